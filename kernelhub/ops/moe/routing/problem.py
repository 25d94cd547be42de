"""Facets and constraints of `route_experts`."""

from __future__ import annotations

from dataclasses import dataclass

from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.problem import facet, feature
from kernelhub.probes.device import DeviceFacts

FLOATS = ("float32", "float16", "bfloat16")
SOFTMAX, SIGMOID, SOFTMAX_AFTER_TOPK = "softmax", "sigmoid", "softmax_after_topk"
SCORINGS = (SOFTMAX, SIGMOID, SOFTMAX_AFTER_TOPK)


@dataclass(frozen=True)
class RoutingProblem:
    """One configuration of `route_experts`."""

    device: DeviceFacts = facet("where the tensors are")
    dtype: str = facet("dtype of the logits", values=FLOATS, default="float32")
    num_experts: int = facet("experts", default=128)
    top_k: int = facet("experts that a token goes to", default=8)
    num_groups: int = facet("groups of experts; 1 for none", default=1)
    topk_groups: int = facet("groups per token", default=1)
    scoring: str = feature("scoring function of the logits", SOFTMAX, (SIGMOID, SOFTMAX_AFTER_TOPK))
    correction_bias: bool = feature("a bias of each expert, used for ranking only", False)
    renormalize: bool = feature("selected weights are divided by their sum", False)
    scaling_factor: bool = feature("weights are multiplied by a factor", False)

    @property
    def group_size(self) -> int:
        """Experts of a group."""
        return self.num_experts // self.num_groups


ROUTE_EXPERTS = OpRecord(
    name="route_experts",
    summary="the experts that each token goes to, best first, and their weights",
    problem=RoutingProblem,
)
