"""From a call of `route_experts` to the C++ function."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from kernelhub.backends.cpp.build import library
from kernelhub.backends.cpp.gemm.fp8.adapter import KINDS
from kernelhub.ops.moe.routing.adapter import RoutingAdapter
from kernelhub.ops.moe.routing.problem import SCORINGS, RoutingProblem
from kernelhub.ops.operands import check_eager

SOURCE = "routing.cpp"
_SIZES = ctypes.c_int64 * 14


class Routing(RoutingAdapter):
    """`route_experts` on a CPU. Made, it compiles the source, or finds it compiled."""

    def __init__(self, problem: RoutingProblem) -> None:
        super().__init__(problem)
        self._run: Any = library(SOURCE).kernelhub_route
        self._run.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64, ctypes.c_float, ctypes.c_int64]
        self._run.restype = None
        # Of contiguous tensors, made once: to make it takes longer than to route a token.
        self._contiguous = self._sizes(problem.num_experts, 1, 1, problem.top_k, 1, problem.top_k, 1)
        self._at_contiguous = ctypes.addressof(self._contiguous)

    def launch(
        self, logits: Tensor, correction_bias: Tensor | None, scaling_factor: float, weights: Tensor, ids: Tensor
    ) -> None:
        check_eager("route_experts")
        sizes, bias = self._at_contiguous, None
        contiguous = logits.is_contiguous() and weights.is_contiguous() and ids.is_contiguous()
        if correction_bias is not None:
            bias = correction_bias.data_ptr()
            contiguous = contiguous and correction_bias.is_contiguous()
        if not contiguous:
            of_bias = 1 if correction_bias is None else correction_bias.stride(0)
            held = self._sizes(*logits.stride(), of_bias, *weights.stride(), *ids.stride())
            sizes = ctypes.addressof(held)
        self._run(
            logits.data_ptr(),
            bias,
            weights.data_ptr(),
            ids.data_ptr(),
            sizes,
            logits.shape[0],
            scaling_factor,
            torch.get_num_threads(),
        )

    def _sizes(self, *strides: int) -> ctypes.Array[ctypes.c_int64]:
        problem = self.problem
        return _SIZES(
            problem.num_experts,
            problem.top_k,
            problem.num_groups,
            problem.topk_groups,
            SCORINGS.index(problem.scoring),
            problem.renormalize,
            KINDS[problem.dtype],
            *strides,
        )
