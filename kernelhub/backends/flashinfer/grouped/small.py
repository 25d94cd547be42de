"""`grouped_gemm` of quantised rows with scales for 16 or 32 columns: CUTLASS on Blackwell.

The library requires groups to begin at multiples of 4 rows, and scales in tiles of 128 rows by 4 columns, those of a
group from a whole tile on. Only the device has the offsets, so rows and scales are gathered there, and rows of
the result back.
"""

from __future__ import annotations

import abc

import torch
from flashinfer.gemm import gemm_base
from torch import Tensor

from kernelhub.backends.flashinfer.grouped.rows import padded
from kernelhub.backends.shared.operands import on_device_of, row_major
from kernelhub.backends.shared.scales import TILE_ROWS, tiled
from kernelhub.ops.formats import E4M3
from kernelhub.ops.gemm.grouped.adapter import GroupedGemmAdapter, GroupedOperands, alphas, moved, places
from kernelhub.ops.gemm.grouped.problem import SPAN, GroupedGemmProblem

_ALIGNMENT = 4  # rows
_SMALLEST = 256  # N and K of the product that loads the module


class _Tiled(GroupedGemmAdapter):
    """A product for each group, in one launch."""

    def __init__(self, problem: GroupedGemmProblem) -> None:
        super().__init__(problem)
        self._dtype = getattr(torch, problem.out_dtype)
        assert problem.a_scale is not None
        self._span = SPAN[problem.a_scale]
        if problem.device.type == "cuda":  # loads or compiles the module: it reports now what it lacks
            codes = torch.zeros(_SMALLEST, _SMALLEST // 2, dtype=torch.uint8, device="cuda")
            scales = torch.zeros(_SMALLEST, _SMALLEST // self._span, dtype=torch.uint8, device="cuda")
            indptr = torch.tensor([0, _SMALLEST], dtype=torch.int32, device="cuda")
            made = torch.empty(_SMALLEST, _SMALLEST, dtype=self._dtype, device="cuda")
            rows = torch.zeros(_SMALLEST, self._bytes(_SMALLEST), dtype=torch.uint8, device="cuda")
            one = torch.ones(1, device="cuda", dtype=torch.float32)
            self._multiply(rows, codes.unsqueeze(0), scales, scales.unsqueeze(0), indptr, one, made)

    def launch(self, operands: GroupedOperands, out: Tensor) -> None:
        result, there = self._product(operands)
        shape = out.shape
        torch.where(there.view(*shape[:-1], 1), result.view(shape), out, out=out)

    def compute(self, operands: GroupedOperands) -> Tensor:
        return self._product(operands)[0].view(*operands.a.shape[:-1], self.problem.n)

    def _product(self, operands: GroupedOperands) -> tuple[Tensor, Tensor]:
        """The result of all rows [M, N], and which of them belong to a group."""
        a, b, a_scale, b_scale = operands.a, operands.b, operands.a_scale, operands.b_scale
        assert a_scale is not None
        assert b_scale is not None
        there = padded(operands, _ALIGNMENT)
        groups, n, _ = b.shape
        rows = row_major(a.view(torch.uint8)).view(-1, a.shape[-1])
        made = torch.empty(len(there.sources), n, dtype=self._dtype, device=a.device)
        with on_device_of(a):
            self._multiply(
                rows.view(torch.int64).index_select(0, there.sources).view(torch.uint8),
                row_major(b.view(torch.uint8)),
                tiled(self._scales_of_rows(operands, a_scale, there.indptr, len(there.sources))),
                tiled(b_scale.reshape(groups * n, -1)).view(groups, n, -1),
                there.indptr,
                alphas(operands, groups),
                made,
            )
        return made.index_select(0, there.destinations), there.there

    def _scales_of_rows(self, operands: GroupedOperands, scale: Tensor, indptr: Tensor, most: int) -> Tensor:
        """Where the kernel looks for them: those of group i behind i tiles that are not full at most."""
        flat = scale.view(torch.uint8).reshape(-1, scale.shape[-1])
        group = torch.arange(len(indptr) - 1, device=scale.device)
        firsts = (indptr[:-1].long() + group * (TILE_ROWS - 1)) // TILE_ROWS * TILE_ROWS
        room = (most + len(group) * (TILE_ROWS - 1)) // TILE_ROWS * TILE_ROWS
        return flat.index_select(0, moved(places(operands)[0], firsts, room, len(flat)))

    @abc.abstractmethod
    def _bytes(self, columns: int) -> int:
        """Of a row of so many columns."""

    @abc.abstractmethod
    def _multiply(
        self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, indptr: Tensor, alpha: Tensor, out: Tensor
    ) -> None:
        """Run into out; codes and scales as bytes."""

    def workspace_bytes(self, *, num_tokens: int) -> int:
        """Rows in groups of fours with results, results in their places, scales in tiles twice, operands plain."""
        problem = self.problem
        rows, groups = num_tokens + 3 * problem.num_groups, problem.k // self._span + 4
        scales = 2 * groups * (rows + problem.num_groups * (problem.n + TILE_ROWS))
        weights = problem.num_groups * problem.n * problem.k // 2
        return rows * (2 * problem.k + 4 * problem.n + 40) + scales + weights


class NvFp4(_Tiled):
    """NVFP4 by NVFP4, on sm_120 and sm_121."""

    def _bytes(self, columns: int) -> int:
        return columns // 2

    def _multiply(
        self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, indptr: Tensor, alpha: Tensor, out: Tensor
    ) -> None:
        gemm_base.group_gemm_nvfp4_nt_groupwise(
            a, b, a_scale, b_scale, indptr, alpha=alpha, out=out, out_dtype=self._dtype
        )


class Mxfp8Mxfp4(_Tiled):
    """MXFP8 by MXFP4."""

    def _bytes(self, columns: int) -> int:
        return columns

    def _multiply(
        self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, indptr: Tensor, alpha: Tensor, out: Tensor
    ) -> None:
        gemm_base.group_gemm_mxfp8_mxfp4_nt_groupwise(
            a.view(E4M3), b, a_scale, b_scale, indptr, out=out, out_dtype=self._dtype
        )
