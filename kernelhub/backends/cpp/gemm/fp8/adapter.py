"""From calls of `fp8_gemm` and `bmm_fp8` to the C++ functions."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernelhub.backends.cpp.build import library
from kernelhub.backends.shared.operands import strides_of_scale
from kernelhub.ops.gemm.fp8.adapter import Fp8GemmAdapter
from kernelhub.ops.gemm.fp8.batched.adapter import BmmFp8Adapter
from kernelhub.ops.gemm.fp8.batched.problem import BATCH, BmmFp8Problem
from kernelhub.ops.gemm.fp8.problem import BLOCK, E8M0, GROUP, Fp8GemmProblem
from kernelhub.ops.operands import check_eager
from kernelhub.runtime.scratch import scratch

SOURCE = "fp8_gemm.cpp"
KINDS = {"bfloat16": 0, "float16": 1, "float32": 2}  # as in the source
_SIZES = 15


class Fp8Gemm(Fp8GemmAdapter):
    """`fp8_gemm` on a CPU. Made, it compiles the source, or finds it compiled."""

    def __init__(self, problem: Fp8GemmProblem) -> None:
        super().__init__(problem)
        compiled = library(SOURCE)
        self._run = compiled.kernelhub_fp8_gemm
        self._run.argtypes = [ctypes.c_void_p] * 8 + [ctypes.c_int64]
        self._run.restype = None
        compiled.kernelhub_fp8_gemm_element_bytes.restype = ctypes.c_int64
        self._element_bytes = int(compiled.kernelhub_fp8_gemm_element_bytes())
        self._kind = KINDS[problem.out_dtype]
        self._group = GROUP.get(problem.scaling, problem.k)
        self._row_block = 128 if problem.scaling == BLOCK else 1

    def launch(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
        check_eager("fp8_gemm")
        problem = self.problem
        a, b = (matrix if matrix.stride(1) == 1 else matrix.contiguous() for matrix in (a, b))
        into = out if out.stride(1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
        added = None if bias is None else bias.float().contiguous()
        work = scratch("fp8_gemm a", (self.workspace_bytes(num_tokens=a.shape[0]),), torch.uint8, a.device)
        sizes = (ctypes.c_int64 * _SIZES)(
            a.shape[0],
            problem.n,
            problem.k,
            self._group,
            self._row_block,
            *strides_of_scale(a_scale),
            problem.a_scale_dtype == E8M0,
            *strides_of_scale(b_scale),
            problem.b_scale_dtype == E8M0,
            a.stride(0),
            b.stride(0),
            into.stride(0),
            self._kind,
        )
        self._run(
            a.data_ptr(),
            b.data_ptr(),
            a_scale.data_ptr(),
            b_scale.data_ptr(),
            None if added is None else added.data_ptr(),
            into.data_ptr(),
            work.data_ptr(),
            ctypes.addressof(sizes),
            torch.get_num_threads(),
        )
        if into is not out:
            out.copy_(into)

    def workspace_bytes(self, *, num_tokens: int) -> int:
        """The activations, decoded."""
        return num_tokens * (-(-self.problem.k // 32) * 32) * self._element_bytes


_BATCHED_SIZES = 13


class BmmFp8(BmmFp8Adapter):
    """`bmm_fp8` on a CPU. Made, it compiles the source, or finds it compiled."""

    def __init__(self, problem: BmmFp8Problem) -> None:
        super().__init__(problem)
        compiled = library(SOURCE)
        self._run = compiled.kernelhub_bmm_fp8
        self._run.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_int64]
        self._run.restype = None
        compiled.kernelhub_fp8_gemm_element_bytes.restype = ctypes.c_int64
        self._element_bytes = int(compiled.kernelhub_fp8_gemm_element_bytes())

    def launch(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor) -> None:
        check_eager("bmm_fp8")
        problem = self.problem
        batch, rows, _ = a.shape
        a, b = (matrix if matrix.stride(2) == 1 else matrix.contiguous() for matrix in (a, b))
        into = out if out.stride(2) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
        num_bytes = self.workspace_bytes(batch=batch, num_tokens=rows)
        work = scratch("bmm_fp8 a", (num_bytes,), torch.uint8, a.device)
        sizes = (ctypes.c_int64 * _BATCHED_SIZES)(
            batch,
            a.stride(0),
            b.stride(0),
            into.stride(0),
            a_scale.stride(0) if problem.a_scaling == BATCH else 0,
            b_scale.stride(0) if problem.b_scaling == BATCH else 0,
            rows,
            problem.n,
            problem.k,
            a.stride(1),
            b.stride(1),
            into.stride(1),
            KINDS[problem.out_dtype],
        )
        self._run(
            a.data_ptr(),
            b.data_ptr(),
            a_scale.data_ptr(),
            b_scale.data_ptr(),
            into.data_ptr(),
            work.data_ptr(),
            ctypes.addressof(sizes),
            torch.get_num_threads(),
        )
        if into is not out:
            out.copy_(into)

    def workspace_bytes(self, *, batch: int, num_tokens: int) -> int:
        """The activations, decoded."""
        return batch * num_tokens * (-(-self.problem.k // 32) * 32) * self._element_bytes
