"""From a call of `route_experts` to its Triton launch."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from kernelhub.backends.shared.operands import on_device_of
from kernelhub.backends.shared.repeat import Repeated
from kernelhub.backends.triton import interpreter
from kernelhub.backends.triton.launch import Launcher
from kernelhub.backends.triton.moe.routing import routing_kernel
from kernelhub.ops.moe.routing.adapter import RoutingAdapter
from kernelhub.ops.moe.routing.problem import RoutingProblem

if triton.knobs.runtime.interpret:
    interpreter.repair()

# Experts of a block of tokens. A thread holds their scores and 64-bit keys, 3 registers each: with 4 warps 8 of
# them, which leaves a whole token to a warp up to 256 experts and enough programs for a small batch.
_TILE = 1024


class Routing(RoutingAdapter):
    """All of it in one launch."""

    def __init__(self, problem: RoutingProblem) -> None:
        super().__init__(problem)
        groups, size = (triton.next_power_of_2(number) for number in (problem.num_groups, problem.group_size))
        self._block = max(1, _TILE // (groups * size))
        self._repeated = Repeated()
        self._launch = Launcher(
            routing_kernel,
            {
                "TOP_K": problem.top_k,
                "K_PAD": triton.next_power_of_2(problem.top_k),
                "GROUPS": problem.num_groups,
                "GROUPS_PAD": groups,
                "TOPK_GROUPS": problem.topk_groups,
                "SIZE": problem.group_size,
                "SIZE_PAD": size,
                "SCORING": problem.scoring,
                "HAS_BIAS": problem.correction_bias,
                "RENORMALIZE": problem.renormalize,
                "BLOCK": self._block,
            },
            num_warps=4,
            num_stages=1,
        )

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
        strides = (*logits.stride(), *weights.stride(), *ids.stride())
        bias_stride = 0 if correction_bias is None else correction_bias.stride(0)
        aligned = not (logits.data_ptr() | weights.data_ptr() | ids.data_ptr()) & 15
        tokens = logits.shape[0]
        with on_device_of(logits):
            self._launch(
                -(-tokens // self._block),
                (logits.get_device(), strides, bias_stride) if aligned else None,
                logits,
                correction_bias,
                weights,
                ids,
                scaling_factor,
                tokens,
                *strides,
                bias_stride,
            )
