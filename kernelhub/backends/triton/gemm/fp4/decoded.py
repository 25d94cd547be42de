"""Products of many rows, for which a float4 weight is decoded once for cuBLAS."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kernelhub.backends.triton.fp4 import LEFT_OF_MX
from kernelhub.backends.triton.gemm.decoded import DecodedProduct
from kernelhub.backends.triton.gemm.fp4.decode import decode_kernel
from kernelhub.backends.triton.gemm.fp4.packing import TILE_K, TILE_N
from kernelhub.backends.triton.launch import Launcher
from kernelhub.backends.triton.requirements import has_float8
from kernelhub.ops.gemm.fp4.adapter import Activations, Weights
from kernelhub.ops.gemm.fp4.problem import GROUP, NVFP4, Fp4GemmProblem

_BLOCK_N, _BLOCK_K = 16, 256


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
        left, has_global = LEFT_OF_MX.get(problem.b_format, 1.0), problem.b_format == NVFP4
        self._product = DecodedProduct(problem.n, problem.k, bias=problem.bias, has_global=has_global, left=left)

    def workspace_bytes(self, rows: int) -> int:
        """Decoded rows, and their product."""
        return self._product.workspace_bytes(rows)

    def launch(self, a: Activations, b: Weights, bias: Tensor | None, out: Tensor) -> None:
        """As of `Fp4GemmAdapter`, on the current device."""
        self._product.launch(a.codes, functools.partial(self._rows, a.codes, b), b.global_scale, bias, out)

    def _rows(self, a: Tensor, b: Weights, first: int, last: int) -> Tensor:
        """Those rows of the weight, in the dtype of a."""
        weight = a.new_empty((last - first, self._problem.k))
        scale = b.scale if b.scale.dtype is torch.uint8 else b.scale.view(torch.uint8)
        strides: tuple[int, ...] = (0, 1, 0, 1) if self._packed else (*b.codes.stride(), *scale.stride())
        variant = None if (b.codes.data_ptr() | weight.data_ptr()) & 15 else (weight.get_device(), strides)
        programs = -(-(last - first) // _BLOCK_N) * -(-self._problem.k // _BLOCK_K)
        self._decode(programs, variant, b.codes, scale, weight, first, last, *strides)
        return weight
