"""The fast half of the checks of collectives: comparisons that let the usual call of a plan through.

Where they say no, the op's full check looks again, and says what is wrong if something is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.arguments import alike, usable
from kernelhub.ops.operands import may_overlap, transformed


def plain_operand(tensor: Any, dtype: torch.dtype, device: int) -> bool:
    """Whether it is an ordinary contiguous tensor of this dtype and device, and torch neither transforms nor traces."""
    try:
        plain = usable(tensor, dtype, device) and not tensor.is_nested and tensor.is_contiguous()
        return plain and not transformed()
    except RuntimeError:  # compressed rows have no such question
        return False


def plain_like(tensor: Any, shape: Sequence[int], dtype: torch.dtype, device: int) -> bool:
    """The same of a tensor of this shape, without the question for transforms."""
    try:
        return alike(tensor, shape, dtype, device) and tensor.is_contiguous()
    except RuntimeError:
        return False


def plain_place(
    place: Any, shape: Sequence[int], dtype: torch.dtype, device: int, operands: Sequence[Tensor | None]
) -> bool:
    """Whether it is an ordinary destination that is one of the operands or shares no memory with any."""
    if not plain_like(place, shape, dtype, device):
        return False
    return not may_overlap(place, [operand for operand in operands if operand is not place])


def group_type() -> Callable[..., Any]:
    """The type of process groups, which need no further question. No argument is of it in a torch without groups."""
    from torch import distributed as dist

    return dist.ProcessGroup if dist.is_available() else Tensor
