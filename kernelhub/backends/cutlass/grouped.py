"""`grouped_gemm` of float4 by float4: vLLM's products of experts, whose rows begin anywhere.

Scales are in tiles of 128 rows, those of a group from a whole tile on, so they are gathered on the device. The
library writes rows of groups alone, into the result itself.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kernelhub.backends.cutlass.libraries import VLLM, operator, supports
from kernelhub.backends.shared.operands import is_row_major, row_major
from kernelhub.backends.shared.scales import TILE_ROWS, tiled
from kernelhub.ops.gemm.grouped.adapter import GroupedGemmAdapter, GroupedOperands, alphas, moved, places
from kernelhub.ops.gemm.grouped.problem import SPAN, GroupedGemmProblem


class VllmNvFp4(GroupedGemmAdapter):
    """NVFP4, whose global scales multiply each group's product."""

    name: ClassVar[str] = "cutlass_fp4_group_mm"
    scale_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn

    def __init__(self, problem: GroupedGemmProblem) -> None:
        super().__init__(problem)
        capability = problem.device.capability
        supports(VLLM, "cutlass_scaled_mm_supports_fp4", capability)
        self._multiply = operator(VLLM, self.name, capability)

    def launch(self, operands: GroupedOperands, out: Tensor) -> None:
        made = row_major(out)  # with what it holds: rows of no group keep it
        self._product(operands, made.view(-1, made.shape[-1]))
        if not is_row_major(out):
            out.copy_(made)

    def _product(self, operands: GroupedOperands, out: Tensor) -> None:
        a, b, a_scale, b_scale = operands.a, operands.b, operands.a_scale, operands.b_scale
        assert a_scale is not None
        assert b_scale is not None
        groups, n, half = b.shape
        starts, sizes = places(operands)
        of_rows, firsts = _in_tiles(a_scale, starts, sizes)
        problems = torch.empty(groups, 3, dtype=torch.int32, device=a.device)
        problems[:, 0], problems[:, 1], problems[:, 2] = sizes, n, 2 * half
        self._multiply(
            out,
            row_major(a.view(torch.uint8).reshape(-1, half)),
            row_major(b.view(torch.uint8)),
            of_rows.view(self.scale_dtype),
            tiled(b_scale.view(torch.uint8).reshape(groups * n, -1)).view(self.scale_dtype).view(groups, n, -1),
            *self._alphas(operands, groups),
            problems,
            starts.int(),
            firsts.int(),
        )

    def _alphas(self, operands: GroupedOperands, groups: int) -> tuple[Tensor, ...]:
        return (alphas(operands, groups),)

    def workspace_bytes(self, *, num_tokens: int) -> int:
        """Tiled scales, twice while they are built, the description of groups, and contiguous operands and result."""
        problem = self.problem
        assert problem.a_scale is not None
        groups, columns = problem.num_groups, problem.k // SPAN[problem.a_scale]
        rows = num_tokens + groups * TILE_ROWS
        weights = groups * problem.n
        scales = 2 * columns * (rows + weights)
        return scales + 8 * rows + 256 * groups + (num_tokens + weights) * problem.k // 2 + 2 * num_tokens * problem.n


class VllmMxFp4(VllmNvFp4):
    """MXFP4; the operator requires scales as bytes."""

    name = "cutlass_mxfp4_group_mm"
    scale_dtype = torch.uint8

    def _alphas(self, operands: GroupedOperands, groups: int) -> tuple[Tensor, ...]:
        return ()


def _in_tiles(scale: Tensor, starts: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Scales of rows as bytes, each group aligned to a tile, and the row at which each begins."""
    flat = scale.view(torch.uint8).reshape(-1, scale.shape[-1])
    lasts = ((sizes + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS).cumsum(0)
    firsts = torch.nn.functional.pad(lasts, (1, 0))[:-1]
    room = (len(flat) + min(len(flat), len(sizes)) * (TILE_ROWS - 1)) // TILE_ROWS * TILE_ROWS
    return tiled(flat.index_select(0, moved(starts, firsts, room, len(flat)))), firsts
