"""One product per group, on any device. Lengths are read on the host, for which a GPU is waited for.

Operands in one float dtype are multiplied as they are where the result has that dtype and no bias is added, so that it
is rounded once; all others in float32, a group's weights dequantised when its turn comes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops import formats
from kernelhub.ops.gemm.grouped.adapter import GroupedGemmAdapter, GroupedOperands
from kernelhub.ops.gemm.grouped.problem import BLOCK, BLOCKS, FP4_BLOCK, GROUPS, GroupedGemmProblem
from kernelhub.ops.gemm.grouped.scales import E8M0_DTYPES


class PerGroup(GroupedGemmAdapter):
    """`grouped_gemm` anywhere."""

    def __init__(self, problem: GroupedGemmProblem) -> None:
        super().__init__(problem)
        self._direct = problem.a_dtype == problem.b_dtype == problem.out_dtype and not problem.bias
        # cuBLAS may add parts of a half-precision sum in half precision; asked for float32 it does not.
        self._wide = problem.device.vendor == "nvidia" and problem.a_dtype == problem.b_dtype in ("float16", "bfloat16")

    def launch(self, operands: GroupedOperands, out: Tensor) -> None:
        a, b = operands.a, operands.b
        for group, span in enumerate(_spans(operands)):
            rows = a[span]
            if not rows.shape[0]:
                continue
            if self._direct and not self._wide:
                result = rows @ b[group].T
            else:
                if self._wide:
                    result = torch.mm(rows, b[group].T, out_dtype=torch.float32)
                else:
                    result = self._rows(rows, operands.a_scale, span) @ self._weights(operands, group).T
                if operands.bias is not None:
                    result += operands.bias[group]
            out[span] = result

    def _rows(self, rows: Tensor, scale: Tensor | None, span: tuple[int | slice, ...]) -> Tensor:
        """The rows of one group in float32, times their scales."""
        values = rows.float()
        kind = self.problem.a_scale
        if scale is None or kind is None:
            return values
        if kind == "tensor":
            return values.mul_(scale.reshape(()))
        factor = _floats(scale[span])
        if kind in GROUPS:
            return values.mul_(factor.repeat_interleave(BLOCK, 1)[:, : self.problem.k])
        return values.mul_(factor.reshape(-1, 1))

    def _weights(self, operands: GroupedOperands, group: int) -> Tensor:
        """The weights of one group in float32, times their scales."""
        kind, scale = self.problem.b_scale, operands.b_scale
        weights = operands.b[group]
        if scale is None or kind is None:
            return weights.float()
        if kind == "tensor":
            return weights.float().mul_(scale.reshape(-1)[group if scale.numel() > 1 else 0])
        if kind == "channel":
            return weights.float().mul_(scale[group].reshape(-1, 1))
        factor = _floats(scale[group])
        if kind in BLOCKS:
            factor = factor.repeat_interleave(BLOCK, 0)[: self.problem.n]
            return weights.float().mul_(factor.repeat_interleave(BLOCK, 1)[:, : self.problem.k])
        values = formats.from_e2m1(weights)
        values *= factor.repeat_interleave(FP4_BLOCK[kind], 1)[:, : self.problem.k]
        if operands.b_global_scale is not None:
            values *= operands.b_global_scale.reshape(-1)[group if operands.b_global_scale.numel() > 1 else 0]
        return values


def _spans(operands: GroupedOperands) -> list[tuple[int | slice, ...]]:
    """Where the rows of each group lie in a; never outside of it."""
    if operands.group_sizes is not None:
        most = operands.a.shape[1]
        sizes = [min(max(size, 0), most) for size in operands.group_sizes.tolist()]
        return [(group, slice(0, size)) for group, size in enumerate(sizes)]
    assert operands.offsets is not None
    ends = [min(max(end, 0), operands.a.shape[0]) for end in operands.offsets.tolist()]
    return [(slice(start, max(start, end)),) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _floats(scale: Tensor) -> Tensor:
    return formats.from_e8m0(scale) if scale.dtype in E8M0_DTYPES else scale.float()
