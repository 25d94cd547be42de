"""The adapter interface of `route_experts`."""

from __future__ import annotations

import abc
from collections.abc import Hashable

from torch import Tensor

from kernelhub.ops.known_calls import Repeatable
from kernelhub.ops.moe.routing.problem import RoutingProblem


class RoutingAdapter(Repeatable, abc.ABC):
    """A kernel of the op, made for one problem. To write one:

    1. In `__init__(problem)` choose what is static.
    2. In `launch` write weights and ids, and return nothing.

    The op has checked what its contract says. Tensors may have any strides. What ranks experts, breaks ties and
    counts for NaN is said by the op's docstring and by `kernelhub.ops.moe.routing.reference`.
    """

    def __init__(self, problem: RoutingProblem) -> None:
        self.problem = problem

    @abc.abstractmethod
    def launch(
        self, logits: Tensor, correction_bias: Tensor | None, scaling_factor: float, weights: Tensor, ids: Tensor
    ) -> None:
        """logits [T, E], correction_bias float32 [E]; weights float32 and ids int32 [T, top_k]; T > 0."""

    @staticmethod
    def identified(
        logits: Tensor, correction_bias: Tensor | None, scaling_factor: float, weights: Tensor, ids: Tensor
    ) -> tuple[Hashable, tuple[Tensor, ...]]:
        """The key and the tensors of a call whose launches may be repeated."""
        tensors = (logits, weights, ids) if correction_bias is None else (logits, weights, ids, correction_bias)
        return (logits.shape[0], scaling_factor), tensors
