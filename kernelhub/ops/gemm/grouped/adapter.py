"""What a kernel must be to answer `grouped_gemm`."""

from __future__ import annotations

import abc
from typing import NamedTuple

import torch
from torch import Tensor

from kernelhub.ops.gemm.grouped.problem import GroupedGemmProblem


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


class GroupedGemmAdapter(abc.ABC):
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
        out = a.new_empty((*a.shape[:-1], self.problem.n), dtype=getattr(torch, self.problem.out_dtype))
        self.launch(operands, out)
        return out
