"""Checks of tensors that the ops of the indexer share: each error names the parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernelhub.errors import InvalidArgument
from kernelhub.ops.arguments import check_wants_no_gradient, dtype_name
from kernelhub.ops.operands import check_operand


def check_tensor(
    op: str,
    parameter: str,
    given: Any,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """A tensor of this shape, on this device, of one of these dtypes, that requires no gradient."""
    check_operand(op, parameter, given)
    if given.dtype not in dtypes:
        allowed = " or ".join(map(dtype_name, dtypes))
        raise InvalidArgument(op, parameter, f"has dtype {dtype_name(given.dtype)}", f"give {allowed}")
    if list(given.shape) != list(shape):
        raise InvalidArgument(op, parameter, f"has shape {list(given.shape)}", f"give {list(shape)}")
    if given.device != device:
        raise InvalidArgument(op, parameter, f"is on {given.device}", f"move it to {device}")
    check_wants_no_gradient(op, parameter, given)
