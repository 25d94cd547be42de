"""From a call of `fused_moe` to the C++ functions: both products of all experts at once, the activation by torch."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from kernelhub.backends.cpp.build import library
from kernelhub.backends.cpp.gemm.fp8.adapter import KINDS
from kernelhub.backends.shared.operands import up_to
from kernelhub.ops.moe.experts.adapter import ExpertsAdapter, Values
from kernelhub.ops.moe.experts.problem import BLOCK_FORMATS, FP8_FORMATS, MXFP4, NVFP4, ExpertsProblem
from kernelhub.ops.moe.experts.reference import joined
from kernelhub.ops.moe.experts.weights import BLOCK, Matrix
from kernelhub.ops.operands import check_eager
from kernelhub.runtime.scratch import scratch

SOURCE = "experts.cpp"
_CODES = {**dict.fromkeys(FP8_FORMATS, 0), MXFP4: 1, NVFP4: 2}  # as in product.h
_TERMS = {"bfloat16": 1, "float16": 2, "float32": 3}  # bfloat16 that hold one such number
_MOST_ADDED = 1 << 26  # elements of what experts add, 256 MB; more tokens than that come in several rounds


class Experts(ExpertsAdapter):
    """`fused_moe` on a CPU. Made, it compiles the source, or finds it compiled."""

    def __init__(self, problem: ExpertsProblem) -> None:
        super().__init__(problem)
        compiled = library(SOURCE)
        compiled.kernelhub_experts_element_bytes.restype = ctypes.c_int64
        self._element_bytes = int(compiled.kernelhub_experts_element_bytes())
        self._sort = _function(compiled.kernelhub_experts_sort, 6, ctypes.c_int64)
        self._prepare = _function(compiled.kernelhub_experts_prepare, 5)
        self._multiply = _function(compiled.kernelhub_experts_multiply, 12)
        self._gather = _function(compiled.kernelhub_experts_gather, 6)
        # Of a prepared row; none if it is quantised.
        self._terms = 0 if problem.fp8_activations else _TERMS[problem.dtype] if self._element_bytes == 2 else 1

    def launch(
        self, x: Tensor, w13: Matrix, w2: Matrix, topk_weights: Tensor, topk_ids: Tensor, values: Values, out: Tensor
    ) -> None:
        check_eager("fused_moe")
        tokens = self._round(x.shape[0])
        if x.stride(1) != 1:
            x = x.contiguous()
        for start in range(0, x.shape[0], tokens):
            rows = slice(start, start + tokens)
            residual = None if values.residual is None else values.residual[rows]
            self._launch(x[rows], w13, w2, topk_weights[rows], topk_ids[rows], values, residual, out[rows])

    def workspace_bytes(self, num_tokens: int) -> int:
        problem = self.problem
        hidden, inner, tokens = problem.hidden_size, problem.intermediate_size, self._round(num_tokens)
        pairs, lines = tokens * problem.top_k, max(1, self._terms) * self._element_bytes
        results = pairs * (2 * inner + hidden) * 4
        return results + lines * (tokens * up_to(hidden, 32) + pairs * up_to(inner, 32))

    def _round(self, num_tokens: int) -> int:
        """Tokens at a time."""
        widest = max(self.problem.hidden_size, 2 * self.problem.intermediate_size)
        return max(1, min(num_tokens, _MOST_ADDED // (self.problem.top_k * widest)))

    def _launch(
        self,
        x: Tensor,
        w13: Matrix,
        w2: Matrix,
        topk_weights: Tensor,
        topk_ids: Tensor,
        values: Values,
        residual: Tensor | None,
        out: Tensor,
    ) -> None:
        problem, (tokens, top_k) = self.problem, topk_ids.shape
        table, on_input = values.expert_map, problem.apply_router_weight_on_input
        places = torch.empty(2, tokens * top_k, dtype=torch.int32, device="cpu")
        starts = torch.empty(problem.num_experts + 1, dtype=torch.int64, device="cpu")
        of_row, of_pair = places.data_ptr(), places.data_ptr() + 4 * tokens * top_k
        mapped = (0, 0) if table is None else (table.shape[0], table.stride(0))
        sizes = (tokens, top_k, problem.num_experts, *topk_ids.stride(), *mapped)
        count = self._sort(topk_ids.data_ptr(), _address(table), of_row, of_pair, starts.data_ptr(), _array(sizes))
        weights, strides = topk_weights.data_ptr(), topk_weights.stride()
        hidden, inner = problem.hidden_size, problem.intermediate_size
        prepared = self._prepared("moe tokens", x, values.a1_scale)
        router = (weights, of_pair, strides, tokens, top_k) if on_input else None
        both = scratch("moe both", (count, 2 * inner), torch.float32, x.device)
        self._product(prepared, of_row, starts, w13, hidden, router, both)
        result = scratch("moe added", (count, hidden), torch.float32, x.device)
        middle = joined(both, problem.activation, values.alpha, values.limit).to(x.dtype)
        self._product(self._prepared("moe inner", middle, values.a2_scale), None, starts, w2, inner, None, result)
        added = (0, 0) if residual is None else residual.stride()
        sizes = (tokens, top_k, hidden, KINDS[problem.dtype], *out.stride(), *added, *strides)
        self._gather(
            result.data_ptr(),
            of_pair,
            None if on_input else weights,
            _address(residual),
            out.data_ptr(),
            _array(sizes),
            torch.get_num_threads(),
        )

    def _prepared(self, tag: str, rows: Tensor, known: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Activations as products take them, and their scales."""
        count, width = rows.shape
        lines = count * max(1, self._terms) * up_to(width, 32)
        into = scratch(tag, (lines * self._element_bytes,), torch.uint8, rows.device)
        group = BLOCK if self.problem.activation_groups else width
        scales = None if self._terms else torch.empty(count, -(-width // group), dtype=torch.float32, device="cpu")
        sizes = (count, width, rows.stride(0), KINDS[self.problem.dtype], self._terms, group)
        self._prepare(
            rows.data_ptr(), _address(known), into.data_ptr(), _address(scales), _array(sizes), torch.get_num_threads()
        )
        return into, scales

    def _product(
        self,
        prepared: tuple[Tensor, Tensor | None],
        of_row: int | None,
        starts: Tensor,
        matrix: Matrix,
        columns: int,
        router: tuple[int, int, tuple[int, ...], int, int] | None,
        into: Tensor,
    ) -> None:
        """The rows of every expert by its weights, scaled, with its bias."""
        rows, scales = prepared
        weight, scale, channel, bias = matrix
        blocks = self.problem.weights in BLOCK_FORMATS
        weights, places, strides, tokens, top_k = (None, None, (0, 0), 0, 0) if router is None else router
        sizes = (
            weight.shape[0],
            weight.shape[1],
            columns,
            max(1, self._terms),
            _CODES[self.problem.weights],
            *weight.stride()[:2],
            *((0, 0, False) if scale is None else (*scale.stride()[:2], blocks and scale.dtype is torch.uint8)),
            BLOCK if blocks else 1,
            BLOCK if blocks else columns,
            *((0, 0) if channel is None else channel.stride()),
            *((0, 0, 0) if bias is None else (*bias.stride(), KINDS[str(bias.dtype).removeprefix("torch.")])),
            1 if scales is None else scales.shape[1],
            tokens,
            router is not None,
            *strides,
            top_k,
        )
        self._multiply(
            rows.data_ptr(),
            _address(scales),
            of_row,
            starts.data_ptr(),
            weight.data_ptr(),
            _address(scale),
            _address(channel),
            _address(bias),
            weights,
            places,
            into.data_ptr(),
            _array(sizes),
            torch.get_num_threads(),
        )


def _function(compiled: Any, pointers: int, returned: type[ctypes.c_int64] | None = None) -> Any:
    """A function of `pointers` pointers; functions without a result take the number of threads last."""
    compiled.argtypes = [ctypes.c_void_p] * pointers + ([] if returned else [ctypes.c_int64])
    compiled.restype = returned
    return compiled


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _array(sizes: tuple[int, ...]) -> Any:
    return (ctypes.c_int64 * len(sizes))(*sizes)
