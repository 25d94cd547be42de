"""`fp8_gemm` scaled in blocks: 1 x 128 of a by 128 x 128 of b."""

from __future__ import annotations

import abc

import torch
from flashinfer.gemm.gemm_base import fp8_blockscale_gemm_sm90, gemm_fp8_nt_groupwise
from torch import Tensor

from kernelhub.backends.flashinfer.gemm.operands import as_float32, columns_of_rows, with_rows
from kernelhub.backends.shared.operands import is_row_major, on_device_of, row_major
from kernelhub.ops.formats import E4M3
from kernelhub.ops.gemm.fp8.adapter import Fp8GemmAdapter
from kernelhub.ops.gemm.fp8.problem import BLOCK, GROUP, Fp8GemmProblem

_SMALLEST = 256  # N and K of the product that loads the module


class _Blocks(Fp8GemmAdapter):
    """What the library's products in blocks share: rows come in whole fours where `pads` says so."""

    pads = False

    def __init__(self, problem: Fp8GemmProblem) -> None:
        super().__init__(problem)
        if problem.device.type == "cuda":  # loads or compiles the module: it reports now what it lacks
            a = torch.zeros(4, _SMALLEST, dtype=E4M3, device="cuda")
            b = torch.zeros(_SMALLEST, _SMALLEST, dtype=E4M3, device="cuda")
            scales = torch.zeros(4, 2, device="cuda", dtype=torch.float32)
            dtype = getattr(torch, problem.out_dtype)
            self.launch(a, b, scales, scales[:2].clone(), None, torch.empty(4, _SMALLEST, dtype=dtype, device="cuda"))

    def launch(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
        rows, columns = out.shape
        room = rows + -rows % 4 if self.pads else rows
        direct = room == rows and is_row_major(out)
        made = row_major(out) if direct else out.new_empty((room, columns))
        with on_device_of(out):
            self._multiply(
                row_major(with_rows(a, room)), row_major(b), as_float32(a_scale), row_major(as_float32(b_scale)), made
            )
        if not direct:
            out.copy_(made[:rows])

    @abc.abstractmethod
    def _multiply(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor) -> None:
        """The library's call; a_scale has as many rows as were given, and any strides."""

    def workspace_bytes(self, *, num_tokens: int) -> int:
        """Operands in the library's layout, scales as float32, and a result for an `out` with gaps."""
        problem, rows = self.problem, num_tokens + 3
        columns = problem.k // GROUP[BLOCK]
        of_b = -(-problem.n // GROUP[BLOCK]) * columns
        return rows * (problem.k + 2 * problem.n + 8 * columns) + 4 * of_b


class BlocksHopper(_Blocks):
    """TensorRT-LLM's form of DeepGEMM, with a and b exchanged below 32 rows.

    The library hands pointers on. The kernel reads the scales of a as [K / 128, M] with columns of whole fours, not as
    [M, K / 128], which is what the library's documentation says and what it does not check.
    """

    def _multiply(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor) -> None:
        rows = a.shape[0]
        fp8_blockscale_gemm_sm90(a, b, columns_of_rows(a_scale, rows + -rows % 4), b_scale, out, out.dtype)

    def workspace_bytes(self, *, num_tokens: int) -> int:
        """The library reserves room for both operands as if it had to quantise them."""
        problem, rows = self.problem, num_tokens + 3
        columns = -(-problem.k // GROUP[BLOCK])
        blocks = -(-problem.n // GROUP[BLOCK]) * columns
        reserved = rows * problem.k + 4 * (rows + 31) * columns + problem.n * problem.k + 4 * blocks
        return super().workspace_bytes(num_tokens=num_tokens) + reserved


class GroupwiseCutlass(_Blocks):
    """CUTLASS on Blackwell, both scales as in checkpoints."""

    pads = True

    def _multiply(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor) -> None:
        scales = row_major(with_rows(a_scale, a.shape[0]))
        gemm_fp8_nt_groupwise(a, b, scales, b_scale, "K", 1, (1, 128, 128), out, out.dtype, "cutlass")


class GroupwiseTrtllm(_Blocks):
    """TensorRT-LLM's kernels on Blackwell, which read the scales of a as [K / 128, M]."""

    pads = True

    def _multiply(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor) -> None:
        scales = columns_of_rows(a_scale, a.shape[0])
        gemm_fp8_nt_groupwise(a, b, scales, b_scale, None, 1, (1, 128, 128), out, out.dtype, "trtllm")
