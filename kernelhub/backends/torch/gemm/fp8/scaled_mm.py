"""torch._scaled_mm: b is given as a transposed view, which is the layout that the operator asks for."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.gemm.fp8.adapter import Fp8GemmAdapter


class ScaledMm(Fp8GemmAdapter):
    """Scaled by tensor. Fast accumulation stays off: it adds in the 14 bits of Hopper's instructions throughout."""

    def launch(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
        scales = self.scales(a_scale, b_scale, a.shape[0])
        bias = None if bias is None else bias.contiguous()
        made = torch._scaled_mm(_rows(a), _rows(b).t(), *scales, bias=bias, out_dtype=out.dtype, use_fast_accum=False)
        out.copy_(made)

    def scales(self, a_scale: Tensor, b_scale: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """As the operator takes them."""
        return a_scale.reshape(()), b_scale.reshape(())


class ScaledMmRowwise(ScaledMm):
    """Scaled by rows of a and of b; one scale is given as many times as there are rows."""

    def scales(self, a_scale: Tensor, b_scale: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        return (
            a_scale.reshape(-1, 1).expand(tokens, 1).contiguous(),
            b_scale.reshape(1, -1).expand(1, self.problem.n).contiguous(),
        )


def _rows(matrix: Tensor) -> Tensor:
    """Row after row. The operator reads strides, and a single row may have any between rows."""
    return matrix.contiguous().as_strided(matrix.shape, (matrix.shape[1], 1))
