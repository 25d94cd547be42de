"""`grouped_gemm` of scaled rows by the library's groupwise products: CUTLASS on Blackwell.

The library requires groups to begin at multiples of 4 rows. Only the device has the offsets, so rows are gathered
into groups of whole fours there, and rows of the result gathered back: nothing waits for lengths. Scales for 16 or 32
columns come in tiles of 128 rows by 4 columns, those of a group from a whole tile on.
"""

from __future__ import annotations

import abc
from typing import NamedTuple

import torch
from flashinfer.gemm import gemm_base
from torch import Tensor

from kernelhub.backends.flashinfer.gemm.operands import as_float32
from kernelhub.backends.shared.operands import on_device_of, row_major
from kernelhub.backends.shared.scales import TILE_ROWS, tiled
from kernelhub.ops.formats import E4M3
from kernelhub.ops.gemm.grouped.adapter import GroupedGemmAdapter, GroupedOperands, alphas, moved, places
from kernelhub.ops.gemm.grouped.problem import BLOCK, SPAN, GroupedGemmProblem

_ALIGNMENT = 4  # rows
_SMALLEST = 256  # N and K of the product that loads the module


class _AlignedGroups(GroupedGemmAdapter):
    """A product for each group, in one launch."""

    def launch(self, operands: GroupedOperands, out: Tensor) -> None:
        result, there = self._product(operands)
        shape = out.shape
        torch.where(there.view(*shape[:-1], 1), result.view(shape), out, out=out)

    def compute(self, operands: GroupedOperands) -> Tensor:
        return self._product(operands)[0].view(*operands.a.shape[:-1], self.problem.n)

    @abc.abstractmethod
    def _product(self, operands: GroupedOperands) -> tuple[Tensor, Tensor]:
        """The result of all rows [M, N], and which of them belong to a group."""


class GroupwiseCutlass(_AlignedGroups):
    """float8 scaled in blocks, both scales as in checkpoints, on sm_100 and sm_103."""

    def __init__(self, problem: GroupedGemmProblem) -> None:
        super().__init__(problem)
        self._dtype = getattr(torch, problem.out_dtype)
        if problem.device.type == "cuda":  # loads or compiles the module: it reports now what it lacks
            codes = torch.zeros(_SMALLEST, _SMALLEST, dtype=E4M3, device="cuda")
            scales = torch.ones(_SMALLEST, _SMALLEST // BLOCK, device="cuda", dtype=torch.float32)
            indptr = torch.tensor([0, _SMALLEST], dtype=torch.int32, device="cuda")
            self._multiply(codes, codes.unsqueeze(0), scales, scales[None, :2].contiguous(), indptr)

    def _product(self, operands: GroupedOperands) -> tuple[Tensor, Tensor]:
        a, b, _, _, a_scale, b_scale, *_ = operands
        assert a_scale is not None
        assert b_scale is not None
        there = _padded(operands, _ALIGNMENT)
        rows = row_major(a).view(-1, a.shape[-1]).view(torch.int64).index_select(0, there.sources).view(E4M3)
        scales = as_float32(row_major(a_scale)).view(-1, a_scale.shape[-1]).index_select(0, there.sources)
        with on_device_of(a):
            made = self._multiply(rows, row_major(b), scales, row_major(as_float32(b_scale)), there.indptr)
        return made.index_select(0, there.destinations), there.there

    def _multiply(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, indptr: Tensor) -> Tensor:
        made = torch.empty(a.shape[0], b.shape[1], dtype=self._dtype, device=a.device)
        gemm_base.group_gemm_fp8_nt_groupwise(
            a, b, a_scale, b_scale, indptr, (1, BLOCK, BLOCK), "K", 1, made, self._dtype
        )
        return made

    def workspace_bytes(self, *, num_tokens: int) -> int:
        """Rows in groups of whole fours with scales and results, results in their own places, operands without gaps."""
        problem = self.problem
        rows = num_tokens + 3 * problem.num_groups
        columns = problem.k // BLOCK
        weights = problem.num_groups * (problem.n * problem.k + 4 * (problem.n // BLOCK) * columns)
        return rows * (2 * problem.k + 8 * columns + 4 * problem.n + 40) + weights


class _Tiled(_AlignedGroups):
    """Quantised rows with scales for 16 or 32 columns, in tiles."""

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

    def _product(self, operands: GroupedOperands) -> tuple[Tensor, Tensor]:
        a, b, a_scale, b_scale = operands.a, operands.b, operands.a_scale, operands.b_scale
        assert a_scale is not None
        assert b_scale is not None
        there = _padded(operands, _ALIGNMENT)
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


class _Padded(NamedTuple):
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


def _padded(operands: GroupedOperands, alignment: int) -> _Padded:
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
    return _Padded(
        firsts.int(),
        (place - firsts[of_place] + starts[of_place]).clamp_(0, rows - 1),
        (firsts[of_row] + within).clamp_(0, most - 1),
        within < sizes[of_row],
    )
