"""Records of the torch kernels of mixtures of experts."""

from __future__ import annotations

from kernelhub.backends.torch import standings
from kernelhub.backends.torch.devices import ANYWHERE
from kernelhub.dispatch.constraint import OneOf, Rule, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.moe.experts.problem import ACTIVATIONS, ASKED_FORMATS, FORMATS, FP8, asked_formats_fit
from kernelhub.ops.moe.routing.problem import FLOATS

_ROUTING = frozenset(
    {"scoring=sigmoid", "scoring=softmax_after_topk", "correction_bias", "renormalize", "scaling_factor"}
)
_EXPERTS = frozenset(
    {
        *(f"activation={name}" for name in ACTIVATIONS[1:]),
        *("w13_bias", "w2_bias", "static_scales", "apply_router_weight_on_input", "expert_map", "residual"),
    }
)

KERNELS = (
    Kernel(
        op="route_experts",
        name="torch.routing",
        target="kernelhub.backends.torch.moe.routing:Routing",
        summary="topk over keys that are distinct for all experts",
        band=Band.REFERENCE,
        constraints=(
            ANYWHERE,
            dtype_in("dtype", *FLOATS),
            anything("num_experts", "top_k", "num_groups", "topk_groups"),
        ),
        features=_ROUTING,
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        source="DeepSeek-V2 and V3 (2024), section 2.1.2",
        standings=standings.EVERYWHERE,
    ),
    Kernel(
        op="fused_moe",
        name="torch.experts",
        target="kernelhub.backends.torch.moe.experts:Experts",
        summary="one expert at a time, rows grouped by expert on the host",
        band=Band.REFERENCE,
        constraints=(
            ANYWHERE,
            dtype_in("dtype", *FLOATS),
            OneOf("weights", FORMATS),
            dtype_in("activation_dtype", *FLOATS, FP8, *ASKED_FORMATS),
            Rule(("weights", "activation_dtype", "static_scales"), asked_formats_fit, "value"),
            anything("num_experts", "top_k", "hidden_size", "intermediate_size"),
        ),
        features=_EXPERTS,
        deterministic=True,
        reads_lengths=True,
        standings=standings.EVERYWHERE,
    ),
)
