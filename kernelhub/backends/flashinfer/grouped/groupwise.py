"""`grouped_gemm` of float8 scaled in blocks: CUTLASS on sm_100 and sm_103.

The library requires groups to begin at multiples of 4 rows. Only the device has the offsets, so rows are gathered
into groups of whole fours, and rows of the result gathered back.
"""

from __future__ import annotations

import torch
from flashinfer.gemm.gemm_base import group_gemm_fp8_nt_groupwise
from torch import Tensor

from kernelhub.backends.flashinfer.gemm.operands import as_float32
from kernelhub.backends.flashinfer.grouped.rows import padded
from kernelhub.backends.shared.operands import on_device_of, row_major
from kernelhub.ops.formats import E4M3
from kernelhub.ops.gemm.grouped.adapter import GroupedGemmAdapter, GroupedOperands
from kernelhub.ops.gemm.grouped.problem import BLOCK, GroupedGemmProblem

_ALIGNMENT = 4  # rows
_SMALLEST = 256  # N and K of the product that loads the module


class GroupwiseCutlass(GroupedGemmAdapter):
    """A product for each group, in one launch, both scales as in checkpoints."""

    def __init__(self, problem: GroupedGemmProblem) -> None:
        super().__init__(problem)
        self._dtype = getattr(torch, problem.out_dtype)
        if problem.device.type == "cuda":  # loads or compiles the module: it reports now what it lacks
            codes = torch.zeros(_SMALLEST, _SMALLEST, dtype=E4M3, device="cuda")
            scales = torch.ones(_SMALLEST, _SMALLEST // BLOCK, device="cuda", dtype=torch.float32)
            indptr = torch.tensor([0, _SMALLEST], dtype=torch.int32, device="cuda")
            self._multiply(codes, codes.unsqueeze(0), scales, scales[None, :2].contiguous(), indptr)

    def launch(self, operands: GroupedOperands, out: Tensor) -> None:
        result, there = self._product(operands)
        shape = out.shape
        torch.where(there.view(*shape[:-1], 1), result.view(shape), out, out=out)

    def compute(self, operands: GroupedOperands) -> Tensor:
        result, _ = self._product(operands)
        return result.view(*operands.a.shape[:-1], self.problem.n)

    def _product(self, operands: GroupedOperands) -> tuple[Tensor, Tensor]:
        """The result of all rows [M, N], and which of them belong to a group."""
        a, b, _, _, a_scale, b_scale, *_ = operands
        assert a_scale is not None
        assert b_scale is not None
        there = padded(operands, _ALIGNMENT)
        rows = row_major(a).view(-1, a.shape[-1]).view(torch.int64).index_select(0, there.sources).view(E4M3)
        scales = as_float32(row_major(a_scale)).view(-1, a_scale.shape[-1]).index_select(0, there.sources)
        with on_device_of(a):
            made = self._multiply(rows, row_major(b), scales, row_major(as_float32(b_scale)), there.indptr)
        return made.index_select(0, there.destinations), there.there

    def _multiply(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, indptr: Tensor) -> Tensor:
        made = torch.empty(a.shape[0], b.shape[1], dtype=self._dtype, device=a.device)
        group_gemm_fp8_nt_groupwise(a, b, a_scale, b_scale, indptr, (1, BLOCK, BLOCK), "K", 1, made, self._dtype)
        return made

    def workspace_bytes(self, *, num_tokens: int) -> int:
        """Rows in groups of whole fours with scales and results, results in their own places, operands without gaps."""
        problem = self.problem
        rows = num_tokens + 3 * problem.num_groups
        columns = problem.k // BLOCK
        weights = problem.num_groups * (problem.n * problem.k + 4 * (problem.n // BLOCK) * columns)
        return rows * (2 * problem.k + 8 * columns + 4 * problem.n + 40) + weights
