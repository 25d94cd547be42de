"""From a call of `bmm_fp8` to the C++ function."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernelhub.backends.cpp.build import library
from kernelhub.backends.cpp.gemm.fp8.adapter import KINDS, SOURCE
from kernelhub.ops.gemm.fp8.batched.adapter import BmmFp8Adapter
from kernelhub.ops.gemm.fp8.batched.problem import BATCH, BmmFp8Problem
from kernelhub.runtime.scratch import scratch

_SIZES = 13


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
        problem = self.problem
        batch, rows, _ = a.shape
        a, b = (matrix if matrix.stride(2) == 1 else matrix.contiguous() for matrix in (a, b))
        into = out if out.stride(2) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
        num_bytes = self.workspace_bytes(batch=batch, num_tokens=rows)
        work = scratch("bmm_fp8 a", (num_bytes,), torch.uint8, a.device)
        sizes = (ctypes.c_int64 * _SIZES)(
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
