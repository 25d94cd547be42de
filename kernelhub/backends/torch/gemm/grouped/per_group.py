"""One product per group, on any device. Lengths are read on the host, for which a GPU is waited for.

Operands in one float dtype are multiplied as they are where the result has that dtype and no bias is added, so that it
is rounded once; all others in float32, a group's weights dequantised when its turn comes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.backends.torch.gemm.grouped.dequantized import LEFT, floats, of_group, scaled_by_spans, unpacked, widened
from kernelhub.backends.torch.gemm.two_scales import multiply_by_both
from kernelhub.ops.gemm.grouped.adapter import GroupedGemmAdapter, GroupedOperands
from kernelhub.ops.gemm.grouped.problem import BLOCK, BLOCKS, FP4, GROUPS, SMALL, SPAN, GroupedGemmProblem
from kernelhub.runtime.host import on_host
from kernelhub.runtime.precision import at_own_precision


class PerGroup(GroupedGemmAdapter):
    """`grouped_gemm` anywhere."""

    def __init__(self, problem: GroupedGemmProblem) -> None:
        super().__init__(problem)
        self._left = LEFT.get(problem.a_scale or "", 1.0) * LEFT.get(problem.b_scale or "", 1.0)
        self._direct = problem.a_dtype == problem.b_dtype == problem.out_dtype and not problem.bias
        # cuBLAS may add parts of a half-precision sum in half precision; asked for float32 it does not.
        self._wide = problem.device.vendor == "nvidia" and problem.a_dtype == problem.b_dtype in ("float16", "bfloat16")

    @at_own_precision
    def launch(self, operands: GroupedOperands, out: Tensor) -> None:
        a, b = operands.a, operands.b
        for group, span in enumerate(_spans(operands)):
            rows = a[span]
            if not rows.shape[0]:
                continue
            if self._direct and not self._wide:
                out[span] = rows @ b[group].T
                continue
            if self._wide:
                result = torch.mm(rows, b[group].T, out_dtype=torch.float32)
            else:
                result = self._rows(rows, operands.a_scale, span) @ self._weights(operands, group).T
            factors = [
                of_group(factor, group)
                for factor in (operands.a_global_scale, operands.b_global_scale)
                if factor is not None
            ]
            if len(factors) == 2:
                multiply_by_both(result, *factors)
            elif factors:
                result *= factors[0]
            if self._left != 1.0:
                result *= self._left
            if operands.bias is not None:
                result += operands.bias[group]
            out[span] = result

    def _rows(self, rows: Tensor, scale: Tensor | None, span: tuple[int | slice, ...]) -> Tensor:
        """The rows of one group in float32, times their scales."""
        kind = self.problem.a_scale
        values = unpacked("rows", rows) if self.problem.a_dtype == FP4 else widened("rows", rows)
        if scale is None or kind is None:
            return values
        if kind in GROUPS or kind in SMALL:
            return scaled_by_spans(values, floats(scale[span]) / LEFT.get(kind, 1.0), SPAN.get(kind, BLOCK))
        of_rows = scale.reshape(()) if kind == "tensor" else scale[span].reshape(-1, 1)
        return values.mul_(of_rows / LEFT[kind])

    def _weights(self, operands: GroupedOperands, group: int) -> Tensor:
        """The weights of one group in float32, times their scales."""
        kind, scale = self.problem.b_scale, operands.b_scale
        weights = operands.b[group]
        if scale is None or kind is None:
            return widened("weights", weights)
        values = unpacked("weights", weights) if self.problem.b_dtype == FP4 else widened("weights", weights)
        if kind in SMALL:
            return scaled_by_spans(values, floats(scale[group]) / LEFT.get(kind, 1.0), SPAN[kind])
        if kind in BLOCKS:
            rows = floats(scale[group]).repeat_interleave(BLOCK, 0)[: self.problem.n]
            return scaled_by_spans(values, rows / LEFT[kind], BLOCK)
        of_columns = of_group(scale, group) if kind == "tensor" else scale[group].reshape(-1, 1)
        return values.mul_(of_columns / LEFT[kind])


def _spans(operands: GroupedOperands) -> list[tuple[int | slice, ...]]:
    """Where the rows of each group lie in a; never outside of it."""
    if operands.group_sizes is not None:
        most = operands.a.shape[1]
        sizes = [min(max(size, 0), most) for size in on_host(operands.group_sizes, "group_sizes")]
        return [(group, slice(0, size)) for group, size in enumerate(sizes)]
    assert operands.offsets is not None
    ends = [min(max(end, 0), operands.a.shape[0]) for end in on_host(operands.offsets, "offsets")]
    return [(slice(start, max(start, end)),) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
