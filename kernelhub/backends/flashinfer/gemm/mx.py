"""`fp8_gemm` scaled by 1 x 32 on both sides, as MXFP8 has it."""

from __future__ import annotations

from typing import ClassVar

import torch
from flashinfer.gemm.gemm_base import mm_mxfp8
from torch import Tensor

from kernelhub.backends.shared.operands import is_row_major, on_device_of, row_major
from kernelhub.backends.shared.scales import TILE_GROUPS, TILE_ROWS, tiled
from kernelhub.ops.formats import E4M3
from kernelhub.ops.gemm.fp8.adapter import Fp8GemmAdapter
from kernelhub.ops.gemm.fp8.problem import GROUP, MX, Fp8GemmProblem

_SMALLEST = 256  # N and K of the product that loads the module


class MxCutlass(Fp8GemmAdapter):
    """CUTLASS on Blackwell. Scales are tiled and passed in one dimension: two would mean another layout."""

    runner: ClassVar[str] = "cutlass"

    def __init__(self, problem: Fp8GemmProblem) -> None:
        super().__init__(problem)
        if problem.device.type == "cuda":  # loads or compiles the module: it reports now what it lacks
            codes = torch.zeros(_SMALLEST, _SMALLEST, dtype=E4M3, device="cuda")
            scale = torch.zeros(_SMALLEST, _SMALLEST // GROUP[MX], dtype=torch.uint8, device="cuda")
            out = torch.empty(_SMALLEST, _SMALLEST, dtype=getattr(torch, problem.out_dtype), device="cuda")
            self.launch(codes, codes, scale, scale, None, out)

    def launch(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
        direct = is_row_major(out)
        made = row_major(out) if direct else out.new_empty(out.shape)
        scales = (tiled(a_scale).view(-1), tiled(b_scale).view(-1))
        with on_device_of(out):
            mm_mxfp8(row_major(a), row_major(b).t(), *scales, made, out.dtype, False, self.runner)
        if not direct:
            out.copy_(made)

    def workspace_bytes(self, *, num_tokens: int) -> int:
        """Scales in tiles, twice while they are made; operands and a result without gaps."""
        n, k = self.problem.n, self.problem.k
        groups = k // GROUP[MX] + TILE_GROUPS
        return 2 * groups * (num_tokens + n + 2 * TILE_ROWS) + num_tokens * (k + 2 * n) + n * k


class MxCudnn(MxCutlass):
    """cuDNN: a graph for each number of rows, kept once made."""

    runner = "cudnn"
