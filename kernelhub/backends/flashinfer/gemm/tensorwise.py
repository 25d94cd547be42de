"""`fp8_gemm` and `bmm_fp8` with one scale for each operand.

The library's own entry gives all streams the same scratch; the function below it takes scratch, so each launch has
its own here.
"""

from __future__ import annotations

import torch
from flashinfer.gemm.gemm_base import fp8_gemm_sm100
from torch import Tensor

from kernelhub.backends.shared.operands import is_row_major, on_device_of, row_major
from kernelhub.ops.formats import E4M3
from kernelhub.ops.gemm.fp8.adapter import Fp8GemmAdapter
from kernelhub.ops.gemm.fp8.batched.adapter import BmmFp8Adapter
from kernelhub.ops.gemm.fp8.batched.problem import BmmFp8Problem
from kernelhub.ops.gemm.fp8.problem import Fp8GemmProblem
from kernelhub.runtime.scratch import scratch

_SCRATCH_BYTES = 32 << 20  # as the library's own entry has it
_SMALLEST = 64  # of the product that loads a module


def multiply(runner: str, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """[B, M, K] by [B, N, K] into [B, M, N] of any strides; the library takes b as [B, K, N], K running fastest."""
    direct = is_row_major(out)
    made = row_major(out) if direct else out.new_empty(out.shape)
    room = scratch("flashinfer gemm", (_SCRATCH_BYTES,), torch.uint8, out.device)
    scales = (row_major(a_scale.reshape(())), row_major(b_scale.reshape(())))
    with on_device_of(out):
        fp8_gemm_sm100(row_major(a), row_major(b).transpose(1, 2), *scales, made, room, [runner])
    if not direct:
        out.copy_(made)


def load(runner: str, problem: Fp8GemmProblem | BmmFp8Problem) -> None:
    """Load or compile the runner's module, which reports now what it lacks."""
    if problem.device.type == "cuda":
        zeros = torch.zeros(1, _SMALLEST, _SMALLEST, dtype=E4M3, device="cuda")
        one = torch.ones((), device="cuda", dtype=torch.float32)
        out = torch.empty(zeros.shape, dtype=getattr(torch, problem.out_dtype), device="cuda")
        multiply(runner, zeros, zeros, one, one, out)


class Cublas(Fp8GemmAdapter):
    """cuBLASLt's product, a batch of one."""

    runner = "cublas"

    def __init__(self, problem: Fp8GemmProblem) -> None:
        super().__init__(problem)
        load(self.runner, problem)

    def launch(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
        multiply(self.runner, a.unsqueeze(0), b.unsqueeze(0), a_scale, b_scale, out.unsqueeze(0))

    def workspace_bytes(self, *, num_tokens: int) -> int:
        """Scratch; operands and a result without gaps."""
        n, k = self.problem.n, self.problem.k
        return _SCRATCH_BYTES + num_tokens * (k + 2 * n) + n * k


class Cudnn(Cublas):
    """cuDNN's product: a graph for each number of rows, kept once made."""

    runner = "cudnn"


class Cutlass(Cublas):
    """CUTLASS on Blackwell."""

    runner = "cutlass_sm10x"


class CublasBatch(BmmFp8Adapter):
    """cuBLASLt's product of a batch."""

    runner = "cublas"

    def __init__(self, problem: BmmFp8Problem) -> None:
        super().__init__(problem)
        load(self.runner, problem)

    def launch(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor) -> None:
        multiply(self.runner, a, b, a_scale, b_scale, out)

    def workspace_bytes(self, *, batch: int, num_tokens: int) -> int:
        """Scratch; operands and a result without gaps."""
        n, k = self.problem.n, self.problem.k
        return _SCRATCH_BYTES + batch * (num_tokens * (k + 2 * n) + n * k)


class CudnnBatch(CublasBatch):
    """cuDNN's product of a batch: a graph for each shape, kept once made."""

    runner = "cudnn"


class CutlassBatch(CublasBatch):
    """CUTLASS's product of a batch on Blackwell."""

    runner = "cutlass_sm10x"
