"""From a call of `bmm_fp8` to its Triton launch: the kernel of `fp8_gemm`, which counts the batch in its programs."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from kernelhub.backends.shared.operands import on_device_of
from kernelhub.backends.shared.repeat import Repeated
from kernelhub.backends.triton import interpreter
from kernelhub.backends.triton.gemm.fp8.product import product_kernel
from kernelhub.backends.triton.gemm.fp8.tiles import Tiles, tiles, tiles_of_e5m2
from kernelhub.backends.triton.launch import Launcher
from kernelhub.backends.triton.requirements import has_float8
from kernelhub.ops.gemm.fp8.batched.adapter import BmmFp8Adapter
from kernelhub.ops.gemm.fp8.batched.problem import BATCH, BmmFp8Problem
from kernelhub.ops.gemm.fp8.problem import ROW

if triton.knobs.runtime.interpret:
    interpreter.repair()

_GROUP_M = 8  # as of `fp8_gemm`


class BmmFp8(BmmFp8Adapter):
    """`bmm_fp8` on any GPU. A scale is one of rows whose strides are 0."""

    def __init__(self, problem: BmmFp8Problem) -> None:
        super().__init__(problem)
        self.native = has_float8(problem.device) and problem.e5m2 is None
        self._launchers: dict[Tiles, Launcher] = {}
        self._repeated = Repeated()

    def launch(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor) -> None:
        given = (a, b, a_scale, b_scale, out)
        self._repeated.run(out.shape, given, self._launch_anew, *given)

    def repeated(self, *given: Any) -> Any:
        return self._repeated.sequence_of(given[-1].shape, given)

    def _launch_anew(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor) -> None:
        batch, m, n = out.shape
        if not self.native:
            a, b = a.view(torch.uint8), b.view(torch.uint8)
        chosen = tiles if self.problem.e5m2 is None else tiles_of_e5m2
        tile = chosen(self.problem.device, ROW, m, batch * n, a.shape[2])  # all matrices' tiles keep the device busy
        strides = (
            *a.stride(),
            *b.stride(),
            *out.stride(),
            a_scale.stride(0) if self.problem.a_scaling == BATCH else 0,
            0,
            0,
            b_scale.stride(0) if self.problem.b_scaling == BATCH else 0,
            0,
            0,
            0,
        )
        aligned = not (a.data_ptr() | b.data_ptr() | out.data_ptr()) & 15
        with on_device_of(a):
            (self._launchers.get(tile) or self._launcher(tile))(
                batch * -(-m // tile.block_m) * -(-n // tile.block_n),
                (a.get_device(), strides) if aligned else None,
                a,
                b,
                out,
                None,  # no parts
                None,
                a_scale,
                b_scale,
                None,
                m,
                n,
                self.problem.k,
                1,
                0,
                *strides,
            )

    def _launcher(self, tile: Tiles) -> Launcher:
        static = {
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "GROUP_M": _GROUP_M,
            "SCALING": ROW,
            "A_E8M0": False,
            "B_E8M0": False,
            "HAS_BIAS": False,
            "SWAPPED": tile.swapped,
            "EVEN_K": self.problem.k % tile.block_k == 0,
            "PARTS": False,
            "NATIVE": self.native,
            "WEIGHT_ONLY": False,
            "A_E5M2": self.problem.e5m2 == "a",
            "B_E5M2": self.problem.e5m2 == "b",
        }
        launcher = Launcher(product_kernel, static, num_warps=tile.num_warps, num_stages=tile.num_stages)
        self._launchers[tile] = launcher
        return launcher
