"""Experts with float8 weights: rows in float8 with a scale for each 128 columns, before both products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.backends.gluon.gemm.grouped.adapter import as_rows
from kernelhub.backends.gluon.launch import Launcher, descriptor
from kernelhub.backends.gluon.moe.layer import TYPES, Layer, Placed
from kernelhub.backends.gluon.moe.product import experts_kernel
from kernelhub.backends.gluon.moe.rows import code_kernel
from kernelhub.backends.shared.sorted_sizes import most_tiles
from kernelhub.ops.formats import E4M3
from kernelhub.ops.moe.experts.adapter import Values
from kernelhub.ops.moe.experts.problem import FP8_BLOCK_UE8M0, ExpertsProblem
from kernelhub.ops.moe.experts.weights import BLOCK, Matrix

_CODED_AT_ONCE = 8  # times 128 columns
_COUNTERS_BYTES = 8  # of tiles that each product has handed out


class Experts(Layer):
    """float8 scaled by blocks."""

    def __init__(self, problem: ExpertsProblem) -> None:
        super().__init__(problem)
        self._code = Launcher(code_kernel, {"K": problem.hidden_size, "BLOCK": _CODED_AT_ONCE})
        self._products = {
            (first, rows): Launcher(experts_kernel, self._static(first, rows))
            for first in (True, False)
            for rows in (64, 128)
        }

    def tiles(self, num_tokens: int) -> str:
        return f"{self._rows(self._round(num_tokens))} x (128 + 128), 128 columns a step"

    def _bytes_between(self, tokens: int) -> int:
        problem = self.problem
        groups, inner = -(-problem.hidden_size // BLOCK), problem.intermediate_size // BLOCK
        return int(tokens * (groups + problem.top_k * inner) * (BLOCK + 4)) + _COUNTERS_BYTES

    def _multiply_both(
        self, x: Tensor, w13: Matrix, w2: Matrix, router: Tensor, placed: Placed, values: Values, added: Tensor
    ) -> None:
        problem, (tokens, hidden), pairs = self.problem, x.shape, added.shape[0]
        inner, height = problem.intermediate_size, self._rows(tokens)
        groups, of_x = -(-hidden // BLOCK), x.stride()
        codes = x.new_empty((tokens, groups * BLOCK), dtype=E4M3)
        scales = x.new_empty((tokens, groups), dtype=torch.float32)
        counters = x.new_empty(2, dtype=torch.int32)
        self._code(
            -(-tokens * groups // _CODED_AT_ONCE),
            (x.get_device(), of_x) if not x.data_ptr() & 15 else None,
            x,
            codes,
            scales,
            counters,
            tokens,
            *of_x,
        )
        joined = x.new_empty((pairs, inner), dtype=E4M3)
        joined_scales = x.new_empty((inner // BLOCK, pairs), dtype=torch.float32)
        whole = (router, placed, counters, values)
        self._multiply(True, height, codes, scales, w13, *whole, joined, joined_scales)
        self._multiply(False, height, joined, joined_scales.t(), w2, *whole, added, None)

    def _multiply(
        self,
        first: bool,
        height: int,
        a: Tensor,
        a_scale: Tensor,
        matrix: Matrix,
        router: Tensor,
        placed: Placed,
        counters: Tensor,
        values: Values,
        out: Tensor,
        out_scale: Tensor | None,
    ) -> None:
        """One product of all experts."""
        problem, (pairs, n), bias = self.problem, out.shape, matrix.bias
        weight, scale = as_rows(matrix.weight), matrix.scale
        assert scale is not None
        across = -(-n // (128 if first else 256))
        strides = (*scale.stride(), *((0, 0) if bias is None else bias.stride()))
        self._products[first, height](
            min(problem.device.num_sms, most_tiles(pairs, problem.num_experts, height) * across),
            (out.get_device(), strides[:3], None if bias is None else bias.dtype),
            a,
            descriptor(a, (64, 128)),
            descriptor(weight.matrix, (128, 128)),
            out,
            out_scale,
            a_scale,
            scale,
            bias,
            router,
            placed.pairs,
            placed.experts,
            placed.rows,
            placed.ends,
            placed.num_tiles,
            counters,
            across,
            n if first else 128,
            n,
            problem.hidden_size if first else a.shape[1],
            weight.apart,
            *a_scale.stride(),
            *strides,
            *router.stride(),
            n,
            pairs,
            float(values.alpha),
            float(values.limit),
        )

    def _static(self, first: bool, rows: int) -> dict[str, Any]:
        problem = self.problem
        return {
            "BM": rows,
            "STAGES": 4 if rows == 128 else 5,
            "TOP_K": problem.top_k,
            "B_E8M0": problem.weights == FP8_BLOCK_UE8M0,
            "HAS_BIAS": problem.w13_bias if first else problem.w2_bias,
            "ON_INPUT": first and problem.apply_router_weight_on_input,
            "FIRST": first,
            "ACTIVATION": problem.activation,
            "HALF": TYPES[self._dtype],
            # float32 fills sectors of memory as it is, and is too wide for the shared memory that is left.
            "BY_LINES": first or self._added_dtype is torch.bfloat16,
        }
