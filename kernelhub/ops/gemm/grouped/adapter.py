"""The adapter interface of `grouped_gemm`, and the positions of groups, computed on the device.

Nothing here waits for lengths.
"""

from __future__ import annotations

import abc
from typing import NamedTuple

import torch
from torch import Tensor

from kernelhub.ops.gemm.grouped.problem import GroupedGemmProblem
from kernelhub.ops.known_calls import Repeatable


class GroupedOperands(NamedTuple):
    """The tensors of one call, as its contract says, with any strides; lengths and global scales are contiguous.

    Lengths are int32 on the same device.
    """

    a: Tensor
    b: Tensor
    offsets: Tensor | None
    group_sizes: Tensor | None
    a_scale: Tensor | None
    b_scale: Tensor | None
    a_global_scale: Tensor | None
    b_global_scale: Tensor | None
    bias: Tensor | None


class GroupedGemmAdapter(Repeatable, abc.ABC):
    """A kernel of the op, made for one problem. To write one:

    1. In `__init__(problem)` choose what is static.
    2. In `launch` run the kernel into `out` and return nothing. Rows that belong to no group keep what `out` holds.
    3. If the library insists on allocating the result, override `compute` too, which spares a copy.

    The op has checked what its contract says. On a GPU nobody has read the lengths: a kernel must not write outside
    of `out` whatever they are.
    """

    def __init__(self, problem: GroupedGemmProblem) -> None:
        self.problem = problem

    @abc.abstractmethod
    def launch(self, operands: GroupedOperands, out: Tensor) -> None:
        """Run into out [M, N], or [G, M_max, N]; it is not empty."""

    def compute(self, operands: GroupedOperands) -> Tensor:
        """Run and return the result, contiguous, where the caller gave no `out`; it is not empty."""
        a = operands.a
        out = a.new_empty(*a.shape[:-1], self.problem.n, dtype=getattr(torch, self.problem.out_dtype))
        self.launch(operands, out)
        return out


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
    """The row for each of `room` places, where groups that start at `starts` go to `firsts`.

    A place belongs to the last group that goes there or before; behind a group's rows come any others.
    """
    place = torch.arange(room, device=firsts.device)
    group = torch.searchsorted(firsts, place, right=True).clamp_(min=1) - 1
    return (place - firsts[group] + starts[group]).clamp_(0, rows - 1)


def alphas(operands: GroupedOperands, groups: int) -> Tensor:
    """The factors of the products of each group, float32 [G], from the global scales."""
    made = torch.ones(groups, dtype=torch.float32, device=operands.a.device)
    for factor in (operands.a_global_scale, operands.b_global_scale):
        if factor is not None:
            made = made * factor.reshape(-1)
    return made


def kept_elsewhere(out: Tensor, made: Tensor, sizes: Tensor) -> None:
    """Masked rows [G, M_max, N] of `made` into `out`, which keeps its others."""
    there = torch.arange(out.shape[1], device=out.device) < sizes.unsqueeze(1)
    torch.where(there.unsqueeze(2), made, out, out=out)
