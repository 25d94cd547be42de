"""Products of many rows with a scale for each 32 columns, both of whose operands are decoded for cuBLAS.

bfloat16 holds them exactly but for the factor 2^8 of each (2^16 of e5m2), so the result is that of the tiles.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kernelhub.backends.shared.operands import adjacent
from kernelhub.backends.triton.gemm.decoded import DecodedProduct
from kernelhub.backends.triton.gemm.fp8.decode import decode_kernel
from kernelhub.backends.triton.launch import Launcher
from kernelhub.ops.gemm.fp8.problem import Fp8GemmProblem

_BLOCK_M, _BLOCK_K = 16, 256


class Decoded:
    """`fp8_gemm` scaled by MX, in four launches for the first stretch of the weight and three for each other one."""

    def __init__(self, problem: Fp8GemmProblem) -> None:
        self._k = problem.k
        static = {"K": problem.k, "BLOCK_M": _BLOCK_M, "BLOCK_K": _BLOCK_K}
        self._decode_a = Launcher(decode_kernel, {**static, "E5M2": problem.e5m2}, num_warps=4)
        self._decode_b = Launcher(decode_kernel, {**static, "E5M2": False}, num_warps=4)
        left = 2.0**24 if problem.e5m2 else 2.0**16
        self._product = DecodedProduct(problem.n, problem.k, bias=problem.bias, has_global=False, left=left)

    def workspace_bytes(self, rows: int) -> int:
        """Decoded activations, decoded rows of the weight, and their product."""
        return 2 * rows * self._k + self._product.workspace_bytes(rows)

    def launch(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """As of `Fp8GemmAdapter`, on the current device."""
        left = self._rows(self._decode_a, a, a_scale, 0, out.shape[0])
        if bias is not None:
            bias = adjacent(bias)  # what follows the product reads it element after element
        self._product.launch(left, functools.partial(self._rows, self._decode_b, b, b_scale), None, bias, out)

    def _rows(self, decode: Launcher, codes: Tensor, scale: Tensor, first: int, last: int) -> Tensor:
        """Those rows in bfloat16."""
        codes, scale = codes.view(torch.uint8), scale.view(torch.uint8)
        values = codes.new_empty((last - first, self._k), dtype=torch.bfloat16)
        strides = (*codes.stride(), *scale.stride())
        aligned = not (codes.data_ptr() | values.data_ptr()) & 15
        variant = (values.get_device(), strides) if aligned else None
        programs = -(-(last - first) // _BLOCK_M) * -(-self._k // _BLOCK_K)
        decode(programs, variant, codes, scale, values, first, last, *strides)
        return values
