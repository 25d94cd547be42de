"""Records of the C++ kernels of mixtures of experts."""

from __future__ import annotations

from kernelhub.backends.cpp import requirements
from kernelhub.backends.cpp.requirements import MACHINE
from kernelhub.dispatch.constraint import OneOf, Rule, anything, dtype_in
from kernelhub.dispatch.kernel import Band, Kernel
from kernelhub.dispatch.standing import verified
from kernelhub.ops.moe.experts.problem import ACTIVATIONS, FORMATS, FP8, FP8_BLOCK, MXINT4, PLAIN, asked_formats_fit
from kernelhub.ops.moe.routing.problem import FLOATS

KERNELS = (
    Kernel(
        op="route_experts",
        name="cpp.routing",
        target="kernelhub.backends.cpp.moe.routing_adapter:Routing",
        summary="scores by vectors, then the largest of the largest of each 32 experts",
        band=Band.TUNED,
        constraints=(
            *MACHINE,
            dtype_in("dtype", *FLOATS),
            anything("num_experts", "top_k", "num_groups", "topk_groups"),
        ),
        features=frozenset(
            {"scoring=sigmoid", "scoring=softmax_after_topk", "correction_bias", "renormalize", "scaling_factor"}
        ),
        deterministic=True,
        batch_invariant=True,
        source="DeepSeek-V2 and V3 (2024), section 2.1.2",
        standings=(
            verified(
                "cpu",
                evidence="CPU, 2 cores, 2026-11-26, torch 2.13.0+cpu, route_experts by C++: 63 tests passed "
                "(benchmarks/results/own_ops_cpu.json)",
            ),
        ),
    ),
    Kernel(
        op="fused_moe",
        name="cpp.experts",
        target="kernelhub.backends.cpp.moe.experts_adapter:Experts",
        summary="codes of routed experts are read once, all experts in one loop",
        band=Band.TUNED,
        constraints=(
            *MACHINE,
            dtype_in("dtype", *FLOATS),
            OneOf(
                "weights",
                tuple(name for name in FORMATS if name not in (PLAIN, MXINT4)),
                why="torch serves plain weights, and mxint4, whose codes times scales are not exact in bfloat16",
            ),
            dtype_in("activation_dtype", *FLOATS, FP8, FP8_BLOCK),
            Rule(("weights", "activation_dtype", "static_scales"), asked_formats_fit, "value"),
            anything("num_experts", "top_k", "hidden_size", "intermediate_size"),
        ),
        features=frozenset(
            {
                *(f"activation={name}" for name in ACTIVATIONS[1:]),
                *("w13_bias", "w2_bias", "static_scales", "apply_router_weight_on_input", "expert_map", "residual"),
            }
        ),
        deterministic=True,
        standings=requirements.STANDINGS,
    ),
)
