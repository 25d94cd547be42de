"""Products of many rows with a scale for each 32 columns: both operands are decoded once, and cuBLAS multiplies.

bfloat16 holds the decoded operands exactly but for the factor 2^8 of each (2^16 of e5m2), so the result is that of the
tiles. It is kept in float32 until that factor and the bias are in. The weight is decoded a stretch of rows at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.backends.triton.gemm.fp4.decode import finish_kernel
from kernelhub.backends.triton.gemm.fp8.decode import decode_kernel
from kernelhub.backends.triton.gemm.multiplied import multiplied
from kernelhub.backends.triton.launch import Launcher
from kernelhub.ops.gemm.fp8.problem import Fp8GemmProblem

_BLOCK_M, _BLOCK_K = 16, 256
_FINISH_BLOCK = 1024
_MOST_BYTES = 256 << 20  # of the decoded rows of the weight, and of their product


class Decoded:
    """`fp8_gemm` scaled by MX, in four launches for the first stretch of the weight and three for each other one."""

    def __init__(self, problem: Fp8GemmProblem) -> None:
        self._problem = problem
        static = {"K": problem.k, "BLOCK_M": _BLOCK_M, "BLOCK_K": _BLOCK_K}
        self._decode_a = Launcher(decode_kernel, {**static, "E5M2": problem.e5m2}, num_warps=4)
        self._decode_b = Launcher(decode_kernel, {**static, "E5M2": False}, num_warps=4)
        self._unit = 16 if problem.n % 16 == 0 else 1
        finish: dict[str, Any] = {
            "UNIT": self._unit,
            "HAS_GLOBAL": False,
            "HAS_BIAS": problem.bias,
            "LEFT": 2.0**24 if problem.e5m2 else 2.0**16,
            "BLOCK": _FINISH_BLOCK,
        }
        self._finish = Launcher(finish_kernel, finish, num_warps=4)

    def stretch(self, rows: int) -> int:
        """Rows of the weight that are decoded together for that many rows of activations."""
        most = min(_MOST_BYTES // (2 * self._problem.k), _MOST_BYTES // (4 * rows))
        return min(self._problem.n, max(most // 1024 * 1024, 1024))

    def workspace_bytes(self, rows: int) -> int:
        """Decoded activations, decoded rows of the weight, and their product."""
        return 2 * rows * self._problem.k + self.stretch(rows) * (2 * self._problem.k + 4 * rows)

    def launch(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """As of `Fp8GemmAdapter`, on the current device."""
        rows, n = out.shape
        step = self.stretch(rows)
        left = self._decoded(self._decode_a, a, a_scale, 0, rows)
        for first in range(0, n, step):
            last = min(first + step, n)
            product = multiplied(left, self._decoded(self._decode_b, b, b_scale, first, last))
            own_bias = bias if bias is None or step == n else bias[first:last]
            self._finish_columns(product, own_bias, out if step == n else out[:, first:last])

    def _decoded(self, decode: Launcher, codes: Tensor, scale: Tensor, first: int, last: int) -> Tensor:
        """Those rows in bfloat16."""
        codes, scale, k = codes.view(torch.uint8), scale.view(torch.uint8), self._problem.k
        values = codes.new_empty((last - first, k), dtype=torch.bfloat16)
        strides = (*codes.stride(), *scale.stride())
        aligned = not (codes.data_ptr() | values.data_ptr()) & 15
        variant = (values.get_device(), strides) if aligned else None
        programs = -(-(last - first) // _BLOCK_M) * -(-k // _BLOCK_K)
        decode(programs, variant, codes, scale, values, first, last, *strides)
        return values

    def _finish_columns(self, product: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Columns of `out`, with the bias of those."""
        rows, columns = out.shape
        aligned = not (product.data_ptr() | out.data_ptr()) & 15
        variant = (out.get_device(), out.stride(), None if bias is None else bias.dtype) if aligned else None
        programs = rows * -(-columns // _FINISH_BLOCK)
        self._finish(programs, variant, product, None, bias, out, columns // self._unit, *out.stride())
