"""Groups moved to aligned rows, computed on the device: nothing waits for lengths."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernelhub.ops.gemm.grouped.adapter import GroupedOperands, places


class Padded(NamedTuple):
    """Consecutive groups, each padded to the alignment.

    Attributes:
        indptr: where groups begin and the last one ends, int32 [G + 1].
        sources: of each padded row, the row that is copied there; that of another where it only fills up.
        destinations: of each row, the padded one with its result.
        there: of each row, whether it belongs to a group.
    """

    indptr: Tensor
    sources: Tensor
    destinations: Tensor
    there: Tensor


def padded(operands: GroupedOperands, alignment: int) -> Padded:
    """Places for as many rows as there can be at most."""
    starts, sizes = places(operands)
    a, groups = operands.a, len(sizes)
    rows = a.shape[:-1].numel()
    lasts = ((sizes + alignment - 1) // alignment * alignment).cumsum(0)
    firsts = torch.nn.functional.pad(lasts, (1, 0))
    most = rows + min(rows, groups) * (alignment - 1)
    place = torch.arange(most, device=a.device)
    of_place = torch.searchsorted(lasts, place, right=True).clamp_(max=groups - 1)
    row = place[:rows]
    if operands.group_sizes is None:
        of_row = torch.searchsorted(starts + sizes, row, right=True).clamp_(max=groups - 1)
    else:
        of_row = row // a.shape[1]
    within = row - starts[of_row]
    return Padded(
        firsts.int(),
        (place - firsts[of_place] + starts[of_place]).clamp_(0, rows - 1),
        (firsts[of_row] + within).clamp_(0, most - 1),
        within < sizes[of_row],
    )
