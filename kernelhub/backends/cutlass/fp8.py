"""`fp8_gemm` by the libraries' operators: they require b as a transposed view."""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from kernelhub.backends.cutlass.layouts import scales_of_blocks, scales_of_rows
from kernelhub.backends.cutlass.libraries import SGL, SGL_OLD, VLLM, operator, supports
from kernelhub.backends.shared.operands import is_row_major, on_device_of, row_major
from kernelhub.ops.gemm.fp8.adapter import Fp8GemmAdapter
from kernelhub.ops.gemm.fp8.problem import BLOCK, GROUP, Fp8GemmProblem

_ROWS = 4  # Hopper's kernel scaled by block takes whole fours; for others vLLM has another kernel, by detours


class VllmScaledMm(Fp8GemmAdapter):
    """Scaled by tensor or row. The operator recognises a scale per tensor by its size, so it is passed as it is."""

    def __init__(self, problem: Fp8GemmProblem) -> None:
        super().__init__(problem)
        capability = problem.device.capability
        supports(VLLM, "cutlass_scaled_mm_supports_fp8", capability)
        self._multiply = operator(VLLM, "cutlass_scaled_mm", capability)

    def launch(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
        direct = is_row_major(out)
        made = row_major(out) if direct else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        scales = row_major(a_scale.reshape(-1)), row_major(b_scale.reshape(-1))
        self._multiply(made, row_major(a), row_major(b).t(), *scales, None if bias is None else row_major(bias))
        if not direct:
            out.copy_(made)

    def workspace_bytes(self, *, num_tokens: int) -> int:
        """A result for an `out` with gaps."""
        return 2 * num_tokens * self.problem.n


class SglScaledMm(Fp8GemmAdapter):
    """Scaled by rows of a and of b; one scale is given as many times as there are rows. The result is copied."""

    def __init__(self, problem: Fp8GemmProblem) -> None:
        super().__init__(problem)
        self._multiply = operator(SGL, "fp8_scaled_mm", problem.device.capability)

    def launch(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
        scales = (
            row_major(a_scale.reshape(-1, 1).expand(out.shape[0], 1)),
            row_major(b_scale.reshape(-1, 1).expand(self.problem.n, 1)),
        )
        with on_device_of(out):
            out.copy_(
                self._multiply(
                    row_major(a), row_major(b).t(), *scales, out.dtype, None if bias is None else row_major(bias)
                )
            )

    def workspace_bytes(self, *, num_tokens: int) -> int:
        """The result, and scales of every row."""
        return 2 * num_tokens * self.problem.n + 4 * (num_tokens + self.problem.n)


class Blockwise(Fp8GemmAdapter):
    """Scaled by 1 x 128 and 128 x 128: scales of a column after column, those of b with blocks of K beside each other.

    Rows are made whole fours with zeros, which every kernel of the libraries takes.
    """

    def launch(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
        rows = out.shape[0]
        more = -rows % _ROWS
        if more:
            a = torch.nn.functional.pad(a.view(torch.uint8), (0, 0, 0, more)).view(a.dtype)
        of_a, of_b = scales_of_rows(a_scale, rows + more), scales_of_blocks(b_scale).t()
        self.multiply(row_major(a), row_major(b).t(), of_a, of_b, out, more)

    @abc.abstractmethod
    def multiply(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor, more: int) -> None:
        """Write the product into `out`, which has `more` rows less than a."""

    def workspace_bytes(self, *, num_tokens: int) -> int:
        """Rows made whole fours, their result, and both scales."""
        problem, rows = self.problem, num_tokens + -num_tokens % _ROWS
        blocks = problem.k // GROUP[BLOCK]
        return rows * (problem.k + 2 * problem.n + 4 * blocks) + 4 * blocks * (problem.n // GROUP[BLOCK])


class VllmBlockwise(Blockwise):
    """vLLM's."""

    def __init__(self, problem: Fp8GemmProblem) -> None:
        super().__init__(problem)
        capability = problem.device.capability
        supports(VLLM, "cutlass_scaled_mm_supports_block_fp8", capability)
        self._multiply = operator(VLLM, "cutlass_scaled_mm", capability)

    def multiply(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor, more: int) -> None:
        direct = not more and is_row_major(out)
        made = row_major(out) if direct else out.new_empty((a.shape[0], out.shape[1]))
        self._multiply(made, a, b, a_scale, b_scale, None)
        if not direct:
            out.copy_(made[: out.shape[0]])


class SglBlockwise(Blockwise):
    """SGLang's operator, which allocates the result."""

    def __init__(self, problem: Fp8GemmProblem) -> None:
        super().__init__(problem)
        self._multiply = operator(SGL_OLD, "fp8_blockwise_scaled_mm", problem.device.capability)

    def multiply(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor, more: int) -> None:
        with on_device_of(out):
            out.copy_(self._multiply(a, b, a_scale, b_scale, out.dtype)[: out.shape[0]])
