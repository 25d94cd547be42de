"""`fp8_gemm` scaled in blocks: 1 x 128 of a by 128 x 128 of b."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.backends.deep_gemm.layouts import scales_of_blocks, scales_of_rows
from kernelhub.backends.deep_gemm.loaded import function
from kernelhub.backends.shared.operands import is_row_major, on_device_of, row_major
from kernelhub.ops.gemm.fp8.adapter import Fp8GemmAdapter
from kernelhub.ops.gemm.fp8.problem import Fp8GemmProblem


class Fp8Blocks(Fp8GemmAdapter):
    """Scales are float32, as Hopper's kernel requires."""

    exponents = False

    def __init__(self, problem: Fp8GemmProblem) -> None:
        super().__init__(problem)
        self._gemm = function("fp8_gemm")

    def launch(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
        direct = is_row_major(out)
        made = row_major(out) if direct else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        rows = scales_of_rows(a_scale, self.exponents)
        blocks = scales_of_blocks(b_scale, self.problem.n, self.exponents)
        with on_device_of(out):
            self._gemm((row_major(a), rows), (row_major(b), blocks), made)
        if not direct:
            out.copy_(made)

    def workspace_bytes(self, *, num_tokens: int) -> int:
        """Both scales in the library's layout; a result for an `out` with gaps."""
        problem, columns = self.problem, -(-self.problem.k // 128)
        of_b = problem.n if self.exponents else -(-problem.n // 128)
        return 4 * columns * (num_tokens + 3 + of_b) + 2 * num_tokens * problem.n


class Fp8BlocksUe8m0(Fp8Blocks):
    """Scales are exponents, as Blackwell's kernel requires; others would have to be rounded."""

    exponents = True
