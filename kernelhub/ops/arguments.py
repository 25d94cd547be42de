"""What the ops of all families say and ask of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype)[6:]


def describe(tensor: Tensor) -> str:
    """Dtype and shape, for messages."""
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def lse_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """[H, T] for q or a result [T, H, D]; [B, H, S] for [B, S, H, D]."""
    *batch, tokens, heads, _ = shape
    return (*batch, heads, tokens)


def plain(tensor: Tensor) -> Tensor:
    """A Parameter, say, as the Tensor that an eager op takes without going through its operator again."""
    return tensor if type(tensor) is Tensor else tensor.as_subclass(Tensor)
