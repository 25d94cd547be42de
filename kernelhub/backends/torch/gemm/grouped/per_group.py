"""One product per group, on any device. Lengths are read on the host, which synchronises with a GPU.

Operands in one float dtype are multiplied as they are where the result has that dtype and no bias is added, so that it
is rounded once; all others in float32, with the weights of one group dequantised at a time. Scales are
multiplied in but for a factor (`LEFT`): the largest elements are beyond float32. Where a scale is for a span of
columns, products are taken span by span in place: nothing is spread out to the size of the weights. fp4 is looked up a
byte at a time, which holds two values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.backends.torch.attention.sequences import e4m3_values
from kernelhub.backends.torch.gemm.two_scales import LEFT_OF_CODES, multiply_by_both
from kernelhub.ops import formats
from kernelhub.ops.gemm.grouped.adapter import GroupedGemmAdapter, GroupedOperands
from kernelhub.ops.gemm.grouped.problem import BLOCK, BLOCKS, FP4, GROUPS, SMALL, SPAN, GroupedGemmProblem
from kernelhub.ops.host import on_host
from kernelhub.ops.precision import at_own_precision
from kernelhub.runtime.scratch import scratch

E4M3 = torch.float8_e4m3fn
_E8M0 = (torch.float8_e8m0fnu, torch.uint8)
# So that 6 or 448 times the largest scale is finite; the least value of mx over it is still a number of float32.
LEFT = {"mxfp4": 2.0**3} | dict.fromkeys(("mxfp8", "tensor", "token", "channel", *GROUPS, *BLOCKS), LEFT_OF_CODES)


def widened(tag: str, values: Tensor) -> Tensor:
    """Any float dtype as float32 in scratch memory, which the next call with the tag reuses on a CPU."""
    into = scratch(f"grouped {tag}", values.shape, torch.float32, values.device)
    if values.dtype is E4M3 and values.device.type == "cpu":
        e4m3_values(f"grouped {tag}", values, into)
        return into
    return into.copy_(values)


def unpacked(tag: str, packed: Tensor) -> Tensor:
    """fp4 [N, K / 2] as float32 [N, K], in memory as of `widened`."""
    packed = packed.view(torch.uint8)
    pairs = formats.from_e2m1(torch.arange(256, device=packed.device, dtype=torch.int32).to(torch.uint8).unsqueeze(1))
    into = scratch(f"grouped fp4 {tag}", (packed.numel(), 2), torch.float32, packed.device)
    torch.index_select(pairs, 0, packed.reshape(-1).int(), out=into)
    return into.view(packed.shape[0], -1)


def scaled_by_spans(values: Tensor, scale: Tensor, span: int) -> Tensor:
    """values [R, K], in place, times scale [R, ceil(K / span)]."""
    whole = values.shape[1] // span
    values[:, : whole * span].unflatten(1, (whole, span)).mul_(scale[:, :whole].unsqueeze(2))
    if whole * span < values.shape[1]:
        values[:, whole * span :].mul_(scale[:, whole:])
    return values


def floats(scale: Tensor) -> Tensor:
    """A scale of any format as float32."""
    return formats.from_e8m0(scale) if scale.dtype in _E8M0 else scale.float()


def of_group(scale: Tensor, group: int) -> Tensor:
    """One factor of a group, where there is one for each or one for all."""
    return scale.reshape(-1)[group if scale.numel() > 1 else 0]


class PerGroup(GroupedGemmAdapter):
    """`grouped_gemm` anywhere."""

    def __init__(self, problem: GroupedGemmProblem) -> None:
        super().__init__(problem)
        self._left = LEFT.get(problem.a_scale or "", 1.0) * LEFT.get(problem.b_scale or "", 1.0)
        self._direct = problem.a_dtype == problem.b_dtype == problem.out_dtype and not problem.bias
        # cuBLAS may add parts of a half-precision sum in half precision; with float32 it does not.
        self._wide = problem.device.vendor == "nvidia" and problem.a_dtype == problem.b_dtype in ("float16", "bfloat16")

    @at_own_precision
    def launch(self, operands: GroupedOperands, out: Tensor) -> None:
        a, b = operands.a, operands.b
        for group, span in enumerate(_spans(operands)):
            rows = a[span]
            if not rows.shape[0]:
                continue
            if self._direct and not self._wide:
                if rows.shape[0] == 1 and rows.stride(1) != 1:
                    rows = rows.contiguous()  # torch 2.8 reads the elements of a half-precision row as if side by side
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
    """The range of rows of each group in a; never outside of it."""
    if operands.group_sizes is not None:
        most = operands.a.shape[1]
        sizes = [min(max(size, 0), most) for size in on_host(operands.group_sizes, "group_sizes")]
        return [(group, slice(0, size)) for group, size in enumerate(sizes)]
    assert operands.offsets is not None
    ends = [min(max(end, 0), operands.a.shape[0]) for end in on_host(operands.offsets, "offsets")]
    return [(slice(start, max(start, end)),) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
