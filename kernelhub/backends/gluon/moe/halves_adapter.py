"""Experts in bfloat16 or float16: tokens are multiplied as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.backends.gluon.gemm.grouped.adapter import as_rows
from kernelhub.backends.gluon.launch import Launcher, descriptor
from kernelhub.backends.gluon.moe.halves import experts_of_halves_kernel
from kernelhub.backends.gluon.moe.layer import Layer, Placed
from kernelhub.backends.shared.operands import is_aligned
from kernelhub.backends.shared.sorted_sizes import most_tiles
from kernelhub.ops.moe.experts.adapter import Values
from kernelhub.ops.moe.experts.problem import ExpertsProblem
from kernelhub.ops.moe.experts.weights import Matrix

_STEP = 64  # columns
_GROUP = 8  # tiles of rows that share columns of weights: up to 1024 rows of an expert


class ExpertsOfHalves(Layer):
    """bfloat16 or float16, not quantised."""

    def __init__(self, problem: ExpertsProblem) -> None:
        super().__init__(problem)
        self._products = {
            (first, rows): Launcher(experts_of_halves_kernel, self._static(first, rows))
            for first in (True, False)
            for rows in (64, 128)
        }

    def tiles(self, num_tokens: int) -> str:
        return f"{self._rows(self._round(num_tokens))} x (128 + 128), {_STEP} columns a step"

    def _bytes_between(self, tokens: int) -> int:
        problem = self.problem
        return int(tokens * (problem.top_k * problem.intermediate_size + problem.hidden_size) * self._dtype.itemsize)

    def _multiply_both(
        self, x: Tensor, w13: Matrix, w2: Matrix, router: Tensor, placed: Placed, values: Values, added: Tensor
    ) -> None:
        height, whole = self._rows(x.shape[0]), (router, placed, values)
        joined = x.new_empty((added.shape[0], self.problem.intermediate_size))
        self._multiply(True, height, _gathered(x), w13, *whole, joined)
        self._multiply(False, height, joined, w2, *whole, added)

    def _multiply(
        self,
        first: bool,
        height: int,
        a: Tensor,
        matrix: Matrix,
        router: Tensor,
        placed: Placed,
        values: Values,
        out: Tensor,
    ) -> None:
        """One product of all experts."""
        problem, (pairs, n), bias = self.problem, out.shape, matrix.bias
        weight = as_rows(matrix.weight)
        across = -(-n // (128 if first else 256))
        self._products[first, height](
            min(problem.device.num_sms, most_tiles(pairs, problem.num_experts, height) * across),
            (out.get_device(), None if bias is None else bias.dtype),
            a,
            descriptor(a, (height, _STEP)),
            descriptor(weight.matrix, (128, _STEP)),
            out,
            bias,
            router,
            placed.pairs,
            placed.experts,
            placed.rows,
            placed.ends,
            placed.num_tiles,
            across,
            n if first else 128,
            n,
            a.shape[1] // 8,
            a.stride(0) // 8,
            weight.apart,
            *((0, 0) if bias is None else bias.stride()),
            *router.stride(),
            n,
            float(values.alpha),
            float(values.limit),
        )

    def _static(self, first: bool, rows: int) -> dict[str, Any]:
        problem = self.problem
        return {
            "BM": rows,
            "STAGES": 4 if rows == 128 else 5,
            "TOP_K": problem.top_k,
            "TAIL": first and problem.hidden_size % _STEP > 0,
            "HAS_BIAS": problem.w13_bias if first else problem.w2_bias,
            "ON_INPUT": first and problem.apply_router_weight_on_input,
            "FIRST": first,
            "ACTIVATION": problem.activation,
            # float32 fills sectors of memory as it is, and is too wide for the shared memory that is left.
            "BY_LINES": first or self._added_dtype is torch.bfloat16,
            "GROUP": _GROUP,
        }


def _gathered(x: Tensor) -> Tensor:
    """Tokens whose rows a program can copy by 16 bytes, with offsets of 32 bits: these, or a copy."""
    near = x.shape[0] * x.stride(0) < 1 << 31
    return x if near and is_aligned(x) else x.clone(memory_format=torch.contiguous_format)
