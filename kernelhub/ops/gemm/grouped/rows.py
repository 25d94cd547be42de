"""Where the rows of groups lie, told on the device: nothing waits for lengths. For adapters whose libraries ask."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.gemm.grouped.adapter import GroupedOperands


def places(operands: GroupedOperands) -> tuple[Tensor, Tensor]:
    """The first row of each group in all of them, and how many it has, int64; within a whatever the lengths are."""
    a = operands.a
    if operands.group_sizes is not None:
        groups, room = a.shape[:2]
        starts = torch.arange(groups, device=a.device) * room
        return starts, operands.group_sizes.long().clamp(0, room)
    assert operands.offsets is not None
    ends = operands.offsets.long().clamp(0, a.shape[0]).cummax(0).values
    starts = torch.nn.functional.pad(ends, (1, 0))[:-1]
    return starts, ends - starts


def moved(starts: Tensor, firsts: Tensor, room: int, rows: int) -> Tensor:
    """Of each of `room` places, which of so many rows comes there, where groups that start at `starts` go to `firsts`.

    A place belongs to the last group that goes there or before; behind a group's rows come any others.
    """
    place = torch.arange(room, device=firsts.device)
    group = torch.searchsorted(firsts, place, right=True).clamp_(min=1) - 1
    return (place - firsts[group] + starts[group]).clamp_(0, rows - 1)


def alphas(operands: GroupedOperands, groups: int) -> Tensor:
    """What the products of each group are multiplied by, float32 [G], from the global scales that there are."""
    made = torch.ones(groups, dtype=torch.float32, device=operands.a.device)
    for factor in (operands.a_global_scale, operands.b_global_scale):
        if factor is not None:
            made = made * factor.reshape(-1)
    return made


def kept_elsewhere(out: Tensor, made: Tensor, sizes: Tensor) -> None:
    """Masked rows [G, M_max, N] of `made` into `out`, which keeps its others."""
    there = torch.arange(out.shape[1], device=out.device) < sizes.unsqueeze(1)
    torch.where(there.unsqueeze(2), made, out, out=out)
