"""Products of many rows: the weight is decoded once, a stretch of its rows at a time, and cuBLAS multiplies.

The product is kept in float32 until the global scale and the bias are in: cuBLAS may add the parts of a split K in the
dtype of its result, and scaling what was rounded rounds twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.backends.triton.fp4 import LEFT_OF_MX
from kernelhub.backends.triton.gemm.fp4.decode import decode_kernel, finish_kernel
from kernelhub.backends.triton.gemm.fp4.packing import TILE_K, TILE_N
from kernelhub.backends.triton.gemm.multiplied import multiplied
from kernelhub.backends.triton.launch import Launcher
from kernelhub.backends.triton.requirements import has_float8
from kernelhub.ops.gemm.fp4.adapter import Activations, Weights
from kernelhub.ops.gemm.fp4.problem import GROUP, NVFP4, Fp4GemmProblem

_BLOCK_N, _BLOCK_K = 16, 256
_FINISH_BLOCK = 1024
_MOST_BYTES = 256 << 20  # of the decoded rows, and of their product


class Decoded:
    """`fp4_gemm` with activations in bfloat16 or float16, in three launches for each stretch of the weight."""

    def __init__(self, problem: Fp4GemmProblem, packed: bool) -> None:
        self._problem = problem
        self._packed = packed
        static = {
            "K": problem.k,
            "FORMAT": problem.b_format,
            "GROUP": GROUP[problem.b_format],
            "TILE_N": TILE_N if packed else 0,
            "TILE_K": TILE_K if packed else 0,
            "BLOCK_N": _BLOCK_N,
            "BLOCK_K": _BLOCK_K,
            "NATIVE": has_float8(problem.device),
        }
        self._decode = Launcher(decode_kernel, static, num_warps=4)
        self._unit = 16 if problem.n % 16 == 0 else 1
        static = {
            "UNIT": self._unit,
            "HAS_GLOBAL": problem.b_format == NVFP4,
            "HAS_BIAS": problem.bias,
            "LEFT": LEFT_OF_MX.get(problem.b_format, 1.0),
            "BLOCK": _FINISH_BLOCK,
        }
        self._finish = Launcher(finish_kernel, static, num_warps=4)

    def stretch(self, rows: int) -> int:
        """Rows of the weight that are decoded together for that many rows of activations."""
        most = min(_MOST_BYTES // (2 * self._problem.k), _MOST_BYTES // (4 * rows))
        return min(self._problem.n, max(most // 1024 * 1024, 1024))

    def workspace_bytes(self, rows: int) -> int:
        """Decoded rows, and their product."""
        return self.stretch(rows) * (2 * self._problem.k + 4 * rows)

    def launch(self, a: Activations, b: Weights, bias: Tensor | None, out: Tensor) -> None:
        """As of `Fp4GemmAdapter`, on the current device."""
        rows, n = out.shape
        step = self.stretch(rows)
        for first in range(0, n, step):
            last = min(first + step, n)
            weight = a.codes.new_empty((last - first, self._problem.k))
            self._decode_rows(b, first, last, weight)
            parts = multiplied(a.codes, weight)
            if step == n:
                self._finish_columns(parts, b, bias, out)
            else:
                own_bias = None if bias is None else bias[first:last]
                self._finish_columns(parts, b, own_bias, out[:, first:last])

    def _decode_rows(self, b: Weights, first: int, last: int, weight: Tensor) -> None:
        """Those rows of the weight into `weight`."""
        scale = b.scale if b.scale.dtype is torch.uint8 else b.scale.view(torch.uint8)
        strides: tuple[int, ...] = (0, 1, 0, 1) if self._packed else (*b.codes.stride(), *scale.stride())
        variant = None if (b.codes.data_ptr() | weight.data_ptr()) & 15 else (weight.get_device(), strides)
        programs = -(-(last - first) // _BLOCK_N) * -(-self._problem.k // _BLOCK_K)
        self._decode(programs, variant, b.codes, scale, weight, first, last, *strides)

    def _finish_columns(self, parts: Tensor, b: Weights, bias: Tensor | None, out: Tensor) -> None:
        """What follows a product, for some columns of `out` and the bias of those."""
        rows, columns = out.shape
        aligned = not (parts.data_ptr() | out.data_ptr()) & 15
        variant = (out.get_device(), out.stride(), None if bias is None else bias.dtype) if aligned else None
        programs = rows * -(-columns // _FINISH_BLOCK)
        units = columns // self._unit
        self._finish(programs, variant, parts, b.global_scale, bias, out, units, *out.stride())
