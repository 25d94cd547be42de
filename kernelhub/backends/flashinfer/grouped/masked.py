"""`grouped_gemm` of masked quantised rows: CuTe DSL's kernel for sm_100 and sm_103, compiled for each M_max.

The library takes views in the order (rows, columns, groups) of memory in the order (groups, rows, columns), and reads
addresses. It stores whole tiles of 128 rows, so what it writes is its own, and rows of groups are copied out of it.
"""

from __future__ import annotations

import torch
from flashinfer.gemm.kernels.grouped_gemm_masked_wrapper import grouped_gemm_nt_masked
from torch import Tensor

from kernelhub.backends.shared.operands import on_device_of, row_major
from kernelhub.backends.shared.scales import TILE_GROUPS, TILE_ROWS, tiled
from kernelhub.ops.gemm.grouped.adapter import GroupedGemmAdapter, GroupedOperands, alphas, kept_elsewhere, places
from kernelhub.ops.gemm.grouped.problem import FP4, SPAN, GroupedGemmProblem


class MaskedCuteDsl(GroupedGemmAdapter):
    """Both operands in NVFP4, in MXFP4 or in MXFP8."""

    def __init__(self, problem: GroupedGemmProblem) -> None:
        super().__init__(problem)
        assert problem.a_scale is not None
        self._span = SPAN[problem.a_scale]
        self._how = {
            "ab_dtype": "float4_e2m1fn" if problem.a_dtype == FP4 else "float8_e4m3fn",
            "sf_dtype": "float8_e4m3fn" if problem.a_scale == "nvfp4" else "float8_e8m0fnu",
            "c_dtype": problem.out_dtype,
            "sf_vec_size": self._span,
        }
        self._has_alpha = problem.a_global_scale or problem.global_scale

    def launch(self, operands: GroupedOperands, out: Tensor) -> None:
        made, sizes = self._product(operands)
        kept_elsewhere(out, made, sizes)

    def compute(self, operands: GroupedOperands) -> Tensor:
        return self._product(operands)[0]

    def _product(self, operands: GroupedOperands) -> tuple[Tensor, Tensor]:
        """All rows [G, M_max, N], and how many of them groups have."""
        a, b, a_scale, b_scale = operands.a, operands.b, operands.a_scale, operands.b_scale
        assert a_scale is not None
        assert b_scale is not None
        groups, room, _ = a.shape
        sizes = places(operands)[1].int()
        made = torch.empty(groups, room, b.shape[1], dtype=getattr(torch, self.problem.out_dtype), device=a.device)
        alpha = {"alpha": alphas(operands, groups), "alpha_dtype": "float32"} if self._has_alpha else {}
        with on_device_of(a):
            grouped_gemm_nt_masked(
                (_last_groups(a), _in_tiles(a_scale)),
                (_last_groups(b), _in_tiles(b_scale)),
                made.permute(1, 2, 0),
                sizes,
                **self._how,
                **alpha,
            )
        return made, sizes

    def workspace_bytes(self, *, num_tokens: int) -> int:
        """A result, scales in tiles twice while they are made, and operands without gaps."""
        problem = self.problem
        rows = num_tokens + problem.num_groups * TILE_ROWS
        scales = 2 * (problem.k // self._span + TILE_GROUPS) * (rows + problem.num_groups * problem.n)
        weights = problem.num_groups * problem.n * problem.k
        return 4 * num_tokens * problem.n + scales + num_tokens * problem.k + weights


def _last_groups(operand: Tensor) -> Tensor:
    """[G, R, C], whole, as (R, C, G)."""
    codes = operand if operand.dtype is torch.float8_e4m3fn else operand.view(torch.uint8)
    return row_major(codes).permute(1, 2, 0)


def _in_tiles(scale: Tensor) -> Tensor:
    """Scales [G, R, C] in tiles, as (32, 4, tiles of rows, 4, tiles of columns, G)."""
    groups, rows, columns = scale.shape
    high, wide = -(-rows // TILE_ROWS), -(-columns // TILE_GROUPS)
    raw = torch.nn.functional.pad(scale.view(torch.uint8), (0, 0, 0, high * TILE_ROWS - rows))
    tiles = tiled(raw.reshape(groups * high * TILE_ROWS, columns)).view(groups, high, wide, 32, 4, TILE_GROUPS)
    return tiles.view(scale.dtype).permute(3, 4, 1, 5, 2, 0)
