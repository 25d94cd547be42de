"""From a call of `fp4_gemm` to the C++ functions of experts: the weight is the only expert, and every row is its."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from kernelhub.backends.cpp.build import library
from kernelhub.backends.cpp.gemm.fp8.adapter import KINDS
from kernelhub.backends.shared.operands import adjacent, up_to
from kernelhub.ops.formats import from_e2m1, from_e8m0
from kernelhub.ops.gemm.fp4.adapter import Activations, Fp4GemmAdapter, Weights
from kernelhub.ops.gemm.fp4.problem import FP8, GROUP, MXFP4, MXFP8, NVFP4, Fp4GemmProblem
from kernelhub.ops.operands import check_eager
from kernelhub.runtime.scratch import scratch

SOURCE = "experts.cpp"
_CODES = {MXFP4: 1, NVFP4: 2}  # as in product.h
_TERMS = {"bfloat16": 1, "float16": 2}  # bfloat16 that hold one such number


class Fp4Gemm(Fp4GemmAdapter):
    """`fp4_gemm` on a CPU. Made, it compiles the source, or finds it compiled."""

    def __init__(self, problem: Fp4GemmProblem) -> None:
        super().__init__(problem)
        compiled = library(SOURCE)
        compiled.kernelhub_experts_element_bytes.restype = ctypes.c_int64
        self._element_bytes = int(compiled.kernelhub_experts_element_bytes())
        self._prepare = compiled.kernelhub_experts_prepare
        self._prepare.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64]
        self._prepare.restype = None
        self._multiply = compiled.kernelhub_experts_multiply
        self._multiply.argtypes = [ctypes.c_void_p] * 12 + [ctypes.c_int64]
        self._multiply.restype = None
        self._rows = problem.a_format if problem.a_format in _TERMS else "bfloat16"
        self._terms = _TERMS[self._rows] if self._element_bytes == 2 else 1

    def launch(self, a: Activations, b: Weights, bias: Tensor | None, out: Tensor) -> None:
        check_eager("fp4_gemm")
        problem, threads = self.problem, torch.get_num_threads()
        rows, of_row = self._activations(a)
        tokens, k = rows.shape
        prepared = scratch("fp4_gemm a", (self._prepared_bytes(tokens),), torch.uint8, rows.device)
        sizes = _array(tokens, k, rows.stride(0), KINDS[self._rows], self._terms, k)
        self._prepare(rows.data_ptr(), None, prepared.data_ptr(), None, ctypes.addressof(sizes), threads)
        codes, scale = adjacent(b.codes), adjacent(b.scale)
        direct = out.dtype is torch.float32 and out.is_contiguous()
        into = out if direct else scratch("fp4_gemm out", tuple(out.shape), torch.float32, out.device)
        starts = _array(0, tokens)
        of_channel = None if b.global_scale is None else b.global_scale.float()
        sizes = _array(
            1,
            problem.n,
            k,
            self._terms,
            _CODES[problem.b_format],
            0,
            codes.stride(0),
            0,
            scale.stride(0),
            0,
            1,
            k,
            0,
            0,
            *((0, 0, 0) if bias is None else (0, 1, KINDS[str(bias.dtype).removeprefix("torch.")])),
            1,
            tokens,
            0,
            0,
            0,
            0,
        )
        self._multiply(
            prepared.data_ptr(),
            None if of_row is None else of_row.data_ptr(),
            None,
            ctypes.addressof(starts),
            codes.data_ptr(),
            scale.data_ptr(),
            None if of_channel is None else of_channel.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None,
            None,
            into.data_ptr(),
            ctypes.addressof(sizes),
            threads,
        )
        if not direct:
            out.copy_(into)

    def _activations(self, a: Activations) -> tuple[Tensor, Tensor | None]:
        """Rows that bfloat16 or float16 hold exactly, and a float32 scale for each, if there are any.

        Elements of a row are adjacent: what torch makes of codes has their order in memory.
        """
        if a.scale is None:
            return adjacent(a.codes), None
        if self.problem.a_format == FP8:
            return adjacent(a.codes).to(torch.bfloat16), a.scale.float().expand(a.codes.shape[0], 1).contiguous()
        form = self.problem.a_format
        values = a.codes.float() if form == MXFP8 else from_e2m1(a.codes)
        factors, of_row = _mx_scales(a.scale) if form in (MXFP8, MXFP4) else (a.scale.float(), a.global_scale)
        rows = (values.unflatten(-1, (-1, GROUP[form])) * factors.unsqueeze(-1)).flatten(-2).to(torch.bfloat16)
        assert of_row is not None
        return adjacent(rows), of_row.float().reshape(-1, 1).expand(rows.shape[0], 1).contiguous()

    def workspace_bytes(self, *, num_tokens: int) -> int:
        """The activations, prepared, and float32 sums."""
        return self._prepared_bytes(num_tokens) + num_tokens * self.problem.n * 4

    def _prepared_bytes(self, num_tokens: int) -> int:
        return num_tokens * self._terms * up_to(self.problem.k, 32) * self._element_bytes


def _mx_scales(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Of e8m0 scales [M, groups] what is left over the largest of a row, which is at most 1, and the largest ones [M].

    A code times 2^127 is no float32. Times what is left it is a bfloat16; groups 2^117 times smaller lose bits.
    """
    missing = scale == 255
    largest = scale.masked_fill(missing, 0).amax(1, keepdim=True)
    left = (scale.int() - largest.int() + 127).clamp(min=0).to(torch.uint8)
    return from_e8m0(left).masked_fill(missing, torch.nan), from_e8m0(largest).flatten()


def _array(*sizes: int) -> Any:
    return (ctypes.c_int64 * len(sizes))(*sizes)
