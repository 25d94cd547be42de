"""torch's operators of scaled products: they require b as a transposed view.

cuBLASLt and CUTLASS read every pointer 16 bytes at a time, those of scales, of the bias and of the result too; torch
hands them on unchecked, and the call ends in CUBLAS_STATUS_NOT_SUPPORTED. Operands that are not aligned are copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.backends.shared.operands import is_row_major, row_major
from kernelhub.ops.gemm.fp8.adapter import Fp8GemmAdapter
from kernelhub.ops.gemm.fp8.problem import BLOCK, GROUP, Fp8GemmProblem


class ScaledMm(Fp8GemmAdapter):
    """Scaled by tensor. Fast accumulation stays off: it adds in the 14 bits of Hopper's instructions throughout."""

    def launch(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
        scales = self.scales(a_scale, b_scale, a.shape[0])
        bias = None if bias is None else row_major(bias)
        made = out if is_row_major(out) else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        torch._scaled_mm(
            _rows(a), _rows(b).t(), *scales, bias=bias, out_dtype=out.dtype, use_fast_accum=False, out=made
        )
        if made is not out:
            out.copy_(made)

    def scales(self, a_scale: Tensor, b_scale: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Scales in the operator's layout."""
        return row_major(a_scale.reshape(())), row_major(b_scale.reshape(()))


class ScaledMmRowwise(ScaledMm):
    """Scaled by rows of a and of b; one scale is given as many times as there are rows."""

    def scales(self, a_scale: Tensor, b_scale: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        return (
            row_major(a_scale.reshape(-1, 1).expand(tokens, 1)),
            row_major(b_scale.reshape(1, -1).expand(1, self.problem.n)),
        )


class ScaledMmBlockwise(Fp8GemmAdapter):
    """Scaled by 1 x 128 and 128 x 128. The operator takes whole fours of rows, and scales in layouts of its own.

    Those of a: as many as there are rows beside each other. Those of b: whole fours of blocks of K beside each other.
    """

    def __init__(self, problem: Fp8GemmProblem) -> None:
        super().__init__(problem)
        self._multiply = torch.ops.aten._scaled_mm_v2.out
        kinds = torch.nn.functional.ScalingType
        self._recipes = [[int(kind.value)] for kind in (kinds.BlockWise1x128, kinds.BlockWise128x128)]
        self._unswizzled = [int(torch.nn.functional.SwizzleType.NO_SWIZZLE.value)]
        self._missing = -(problem.k // GROUP[BLOCK]) % 4

    def launch(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
        rows = out.shape[0]
        more = -rows % 4
        if more:
            a = torch.nn.functional.pad(a.view(torch.uint8), (0, 0, 0, more)).view(a.dtype)
            a_scale = torch.nn.functional.pad(a_scale, (0, 0, 0, more))
        whole = not more and is_row_major(out)
        made = out if whole else out.new_empty((rows + more, out.shape[1]))
        if self._missing:
            spread = b_scale.new_empty((b_scale.shape[0], b_scale.shape[1] + self._missing))
            spread[:, : b_scale.shape[1]] = b_scale  # columns past it are in no block
            b_scale = spread
        self._multiply(
            *(_rows(a), _rows(b).t()),
            *([_rows(a_scale.t()).t()], self._recipes[0], self._unswizzled),
            *([_rows(b_scale).t()], self._recipes[1], self._unswizzled),
            *(None, out.dtype, [], False),
            out=made,
        )
        if not whole:
            out.copy_(made[:rows])

    def workspace_bytes(self, *, num_tokens: int) -> int:
        """Rows made whole fours, their result, and scales in the operator's layouts."""
        problem, rows = self.problem, -(-num_tokens // 4) * 4
        blocks = problem.k // GROUP[BLOCK]
        of_b = -(-problem.n // GROUP[BLOCK]) * (blocks + self._missing) * 4
        return rows * (problem.k + 2 * problem.n + 8 * blocks) + of_b


def _rows(matrix: Tensor) -> Tensor:
    """Row after row. The operator reads strides, and a single row may have any between rows."""
    if matrix.stride() == (matrix.shape[1], 1) and not matrix.data_ptr() & 15:
        return matrix
    return row_major(matrix)
