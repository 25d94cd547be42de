"""Records of the Triton kernels of mixtures of experts."""

from __future__ import annotations

from kernelhub.backends.triton import standings
from kernelhub.backends.triton.requirements import MACHINE
from kernelhub.dispatch.constraint import Between, OneOf, Rule, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.moe.experts.problem import (
    ACTIVATIONS,
    ASKED_FORMATS,
    FORMATS,
    FP8,
    MXFP4,
    MXFP8,
    MXINT4,
    ExpertsProblem,
    asked_formats_fit,
)
from kernelhub.ops.moe.routing.problem import FLOATS

_IN_REGISTERS = "a program holds all experts of a token"


def _scales_fit(problem: ExpertsProblem) -> str | None:
    if problem.dtype == "float16":
        if problem.weights in (MXFP4, MXINT4):
            return f"scales of {problem.weights} reach 2^127, which exceeds float16"
        if problem.activation_dtype == MXFP8:
            return "scales of mxfp8 reach 2^127, which exceeds float16"
    return None


KERNELS = (
    Kernel(
        op="route_experts",
        name="triton.routing",
        target="kernelhub.backends.triton.moe.routing_adapter:Routing",
        summary="scores, groups, top-k and weights in one pass",
        band=Band.PORTABLE,
        constraints=(
            *MACHINE,
            dtype_in("dtype", *FLOATS),
            Between("num_experts", 1, 1024, why=_IN_REGISTERS),
            Between("top_k", 1, 64, why="a program holds all experts of a token's top-k"),
            Between("num_groups", 1, 64, why=_IN_REGISTERS),
            anything("topk_groups"),
        ),
        features=frozenset(
            {"scoring=sigmoid", "scoring=softmax_after_topk", "correction_bias", "renormalize", "scaling_factor"}
        ),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        source="DeepSeek-V2 and V3 (2024), section 2.1.2",
        standings=standings.STANDINGS,
    ),
    Kernel(
        op="fused_moe",
        name="triton.experts",
        target="kernelhub.backends.triton.moe.experts_adapter:Experts",
        summary="pairs sorted on the device, two products over padded tiles, sums in a fixed order",
        band=Band.PORTABLE,
        constraints=(
            *MACHINE,
            dtype_in("dtype", *FLOATS),
            OneOf("weights", FORMATS),
            dtype_in("activation_dtype", *FLOATS, FP8, *ASKED_FORMATS),
            Rule(("weights", "activation_dtype", "static_scales"), asked_formats_fit, "value"),
            Rule(
                ("weights", "dtype", "activation_dtype"),
                _scales_fit,
                remedy="run in bfloat16, as gpt-oss and Kimi K2 are published",
            ),
            Between("num_experts", 1, 1023, why="a program holds the counts of all experts"),
            Between("top_k", 1, 64),
            Between("hidden_size", 1, 1 << 15, why="a program quantises a whole row"),
            Between("intermediate_size", 1, 1 << 15, why="a program quantises a whole row"),
        ),
        features=frozenset(
            {
                *(f"activation={name}" for name in ACTIVATIONS[1:]),
                *("w13_bias", "w2_bias", "static_scales", "apply_router_weight_on_input", "expert_map", "residual"),
            }
        ),
        graph=GraphLevel.FULL,
        configurable=True,
        deterministic=True,
        source="the grouping of tokens of vLLM's fused_moe; DeepSeek-V3 (2024), section 3.3.2, for scales of blocks",
        standings=standings.STANDINGS,
    ),
)
