"""Tensors as kernels take them: small formats as bytes, and strides of as many dimensions as a kernel has."""

from __future__ import annotations

import torch
from torch import Tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """Formats of one byte as uint8, since sm_80 has no pointers to float8."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 and tensor.dtype is not torch.uint8 else tensor


def strides_of(tensor: Tensor, ndim: int) -> tuple[int, ...]:
    """Strides of so many dimensions; those that come before the tensor's own have none."""
    strides = tensor.stride()
    return strides if len(strides) == ndim else (*(0,) * (ndim - len(strides)), *strides)
