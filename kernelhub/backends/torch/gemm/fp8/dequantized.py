"""Weights, or matrices of a batch, made float32, as many at a time as fit the caches, and multiplied.

Of scales, up to 2^128, a power of two is left for the product: 448 x 2^127 is beyond float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.backends.torch.attention.sequences import e4m3_values, e5m2_values
from kernelhub.backends.torch.gemm.two_scales import LEFT_OF_CODES, LEFT_OF_E5M2, multiply_by_both
from kernelhub.ops.formats import E5M2
from kernelhub.ops.gemm.fp8.adapter import Fp8GemmAdapter, WeightOnlyAdapter
from kernelhub.ops.gemm.fp8.batched.adapter import BmmFp8Adapter
from kernelhub.ops.gemm.fp8.problem import BLOCK, GROUP, ROW, TENSOR
from kernelhub.ops.gemm.fp8.scaling import blocks, values_of
from kernelhub.ops.precision import at_own_precision
from kernelhub.runtime.scratch import scratch

# Weights at a time: 1 MB and 4 MB in float32 on a CPU, 256 MB on a GPU. A multiple of 128 rows is taken.
_WEIGHTS = {"cpu": 1 << 20, "cuda": 1 << 26}


class Dequantized(Fp8GemmAdapter, WeightOnlyAdapter):
    """`fp8_gemm` anywhere."""

    @at_own_precision
    def launch(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
        left = self._matrix("fp8_gemm a", a, a_scale, 1)
        self._multiply(left, b, b_scale, bias, out, _left_of(a) * LEFT_OF_CODES)

    @at_own_precision
    def launch_weights(self, a: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
        left = scratch("fp8_gemm a", a.shape, torch.float32, a.device).copy_(a)
        self._multiply(left, b, b_scale, bias, out, LEFT_OF_CODES)

    def _multiply(
        self, left: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor, left_over: float
    ) -> None:
        n, k = b.shape
        step = max(128, _WEIGHTS[b.device.type] // k // 128 * 128)
        for start in range(0, n, step):
            rows = slice(start, start + step)
            right = self._matrix("fp8_gemm b", b[rows], self._of_rows(b_scale, start, step), self._row_block)
            product = left @ right.t()
            product *= left_over
            if bias is not None:
                product += bias[rows]
            out[:, rows] = product

    @property
    def _row_block(self) -> int:
        return 128 if self.problem.scaling == BLOCK else 1

    def _of_rows(self, b_scale: Tensor, start: int, step: int) -> Tensor:
        """Scales of some rows of b."""
        if self._one_scale(b_scale):
            return b_scale
        first = start // self._row_block
        return b_scale[first : first + blocks(step, self._row_block)]

    def _one_scale(self, scale: Tensor) -> bool:
        one = scale.ndim < 2 and scale.numel() == 1
        return self.problem.scaling == TENSOR or (self.problem.scaling == ROW and one)

    def _matrix(self, tag: str, codes: Tensor, scale: Tensor, row_block: int) -> Tensor:
        """Codes as float32 with their scales."""
        rows, columns = codes.shape
        if codes.device.type == "cpu":
            values = scratch(tag, codes.shape, torch.float32, codes.device)
            (e5m2_values if codes.dtype is E5M2 else e4m3_values)(tag, codes, values)
        else:
            values = codes.float()
        factors = values_of(scale) / _left_of(codes)
        if self._one_scale(scale):
            return values.mul_(factors)
        if factors.ndim == 1:
            factors = factors.unsqueeze(1)
        if row_block > 1:
            factors = factors.repeat_interleave(row_block, 0)[:rows]
        if self.problem.scaling != ROW:
            group = GROUP[self.problem.scaling]
            factors = factors.repeat_interleave(group, 1)[:, :columns]
        return values.mul_(factors)


def _left_of(codes: Tensor) -> float:
    """The factor that scales codes down."""
    return LEFT_OF_E5M2 if codes.dtype is E5M2 else LEFT_OF_CODES


_BATCHED_WEIGHTS = {"cpu": 1 << 20, "cuda": 1 << 26}  # at a time: 4 MB and 256 MB in float32


class DequantizedBatch(BmmFp8Adapter):
    """`bmm_fp8` anywhere."""

    @at_own_precision
    def launch(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor) -> None:
        batch, rows, columns = a.shape
        of_a, of_b = (scale.reshape(-1, 1, 1).expand(batch, 1, 1) for scale in (a_scale, b_scale))
        step = max(1, _BATCHED_WEIGHTS[a.device.type] // (max(rows, b.shape[1]) * columns))
        for start in range(0, batch, step):
            some = slice(start, start + step)
            left, right = _values("bmm_fp8 a", a[some]), _values("bmm_fp8 b", b[some])
            product = torch.bmm(left, right.transpose(1, 2))
            multiply_by_both(product, of_a[some], of_b[some])
            out[some] = product


def _values(tag: str, codes: Tensor) -> Tensor:
    """Codes as float32."""
    if codes.device.type != "cpu":
        return codes.float()
    values = scratch(tag, codes.shape, torch.float32, codes.device)
    (e5m2_values if codes.dtype is E5M2 else e4m3_values)(tag, codes, values)
    return values
