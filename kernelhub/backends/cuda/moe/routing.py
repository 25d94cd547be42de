"""From a call of `route_experts` to its CUDA launch."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor

from kernelhub.backends.cuda import library
from kernelhub.backends.cuda.moe import experts_of_lane, lanes_of_group
from kernelhub.backends.cuda.shapes import C_TYPES, VECTOR_BYTES, WARP, blocks_for, in_vectors
from kernelhub.backends.shared.repeat import Repeated
from kernelhub.ops.moe.routing.adapter import RoutingAdapter
from kernelhub.ops.moe.routing.problem import SCORINGS, RoutingProblem

_PACKING = "4P" + "8q" + "f"
_BLOCK = 128
_FEW = 1024  # tokens up to which each has a block, so that they spread over all multiprocessors


class Routing(RoutingAdapter):
    """A warp for a token."""

    def __init__(self, problem: RoutingProblem) -> None:
        super().__init__(problem)
        self._repeated = Repeated()
        size = getattr(torch, problem.dtype).itemsize
        lanes, each = lanes_of_group(problem.num_groups), experts_of_lane(problem)
        made = library.library(
            "route_experts.cu",
            {
                "ELEMENT": C_TYPES[problem.dtype],
                "SIZE": size,
                "EXPERTS": problem.num_experts,
                "TOP_K": problem.top_k,
                "GROUPS": problem.num_groups,
                "TOPK_GROUPS": problem.topk_groups,
                "LANES": lanes,
                "EACH": each,
                "SCORING": SCORINGS.index(problem.scoring),
                "HAS_BIAS": int(problem.correction_bias),
                "RENORMALIZE": int(problem.renormalize),
            },
            problem.device,
        )
        self._elements = made.kernel("route_elements", _PACKING)
        self._each = math.gcd(each * size, VECTOR_BYTES) // size
        whole = lanes * each * problem.num_groups == problem.num_experts and each * size % 4 == 0
        self._vectors = made.kernel("route_vectors", _PACKING) if whole else None

    def launch(
        self, logits: Tensor, correction_bias: Tensor | None, scaling_factor: float, weights: Tensor, ids: Tensor
    ) -> None:
        given = (logits, correction_bias, scaling_factor, weights, ids)
        self._repeated.run(*self.identified(*given), self._launch_anew, *given)

    def repeated(self, *given: Any) -> Any:
        return self._repeated.sequence_of(*self.identified(*given))

    def _launch_anew(
        self, logits: Tensor, correction_bias: Tensor | None, scaling_factor: float, weights: Tensor, ids: Tensor
    ) -> None:
        kernel, tokens = self._elements, logits.shape[0]
        # Of 16 bytes whatever a lane reads at once: a repeated call checks no other alignment of float32.
        if self._vectors is not None and in_vectors(logits, self._each) and not logits.data_ptr() % VECTOR_BYTES:
            kernel = self._vectors
        threads = WARP if tokens <= _FEW else _BLOCK
        kernel(
            logits.get_device(),
            blocks_for(tokens * WARP, threads),
            threads,
            logits,
            0 if correction_bias is None else correction_bias,
            weights,
            ids,
            tokens,
            *logits.stride(),
            0 if correction_bias is None else correction_bias.stride(0),
            *weights.stride(),
            *ids.stride(),
            ctypes.c_float(scaling_factor).value,  # infinite beyond float32, which `struct` refuses
        )
