"""Calls of `route_experts` and `fused_moe` as serving makes them."""

from __future__ import annotations

import torch

from kernelhub.ops.formats import E4M3
from kernelhub.ops.moe.experts.problem import (
    ASKED_FORMATS,
    FOUR_BIT_FORMATS,
    FP8,
    FP8_FORMATS,
    MXINT4,
    NVFP4,
    PLAIN,
    ExpertsProblem,
)
from kernelhub.ops.moe.experts.weights import scale_dtypes, scale_shapes
from kernelhub.ops.moe.routing.problem import RoutingProblem
from kernelhub.ops.serving import Arguments, Batch, Calls, Sizes, Values


def route_experts_calls(problem: RoutingProblem, sizes: Sizes, values: Values) -> Calls:
    """A router's logits."""
    said: Arguments = {
        "top_k": problem.top_k,
        "scoring": problem.scoring,
        "renormalize": problem.renormalize,
        "scaling_factor": 2.5 if problem.scaling_factor else 1.0,
    }
    if problem.num_groups > 1:
        said |= {"num_groups": problem.num_groups, "topk_groups": problem.topk_groups}
    if problem.correction_bias:
        said["correction_bias"] = values.normal(problem.num_experts, dtype=torch.float32, size=0.2)
    return lambda batch: {"logits": values.normal(batch.tokens, problem.num_experts, dtype=problem.dtype), **said}


def fused_moe_calls(problem: ExpertsProblem, sizes: Sizes, values: Values) -> Calls:
    """The experts of one rank, every token to `top_k` of them.

    `sizes`: ``global_experts``, those of all ranks, where a map says which are here.
    """
    experts = sizes.get("global_experts", problem.num_experts) if problem.expert_map else problem.num_experts
    layer = _layer(problem, values)
    if problem.expert_map:
        here = torch.full((experts,), -1, dtype=torch.int32, device="cpu")
        here[: problem.num_experts] = torch.arange(problem.num_experts, dtype=torch.int32, device="cpu")
        layer["expert_map"] = here.to(values.device)

    def call(batch: Batch) -> Arguments:
        x = values.normal(batch.tokens, problem.hidden_size, dtype=problem.dtype)
        chosen = values.near(batch.tokens, problem.top_k, size=1.0)
        made: Arguments = {
            "x": x,
            "topk_ids": values.picks(batch.tokens, experts, problem.top_k),
            "topk_weights": chosen / chosen.sum(1, keepdim=True) if values.filled else chosen,
        }
        if problem.residual:
            made["residual"] = values.normal(batch.tokens, problem.hidden_size, dtype=problem.dtype)
        return made | layer

    return call


def _layer(problem: ExpertsProblem, values: Values) -> Arguments:
    """The part of a call that all steps share."""
    made: Arguments = {"activation": problem.activation}
    if problem.activation_dtype in ASKED_FORMATS:
        made["activation_dtype"] = problem.activation_dtype
    elif problem.weights in FP8_FORMATS:
        made["activation_dtype"] = E4M3 if problem.activation_dtype == FP8 else getattr(torch, problem.dtype)
    if problem.static_scales:
        made |= {"a1_scale": values.near(1, size=2.0**-6), "a2_scale": values.near(1, size=2.0**-6)}
    if problem.apply_router_weight_on_input:
        made["apply_router_weight_on_input"] = True
    inner, hidden = problem.intermediate_size, problem.hidden_size
    for name, rows, columns, bias in (
        ("w13", 2 * inner, hidden, problem.w13_bias),
        ("w2", hidden, inner, problem.w2_bias),
    ):
        made |= _weights(name, problem, values, rows, columns)
        if bias:
            made[f"{name}_bias"] = values.normal(problem.num_experts, rows, dtype=problem.dtype, size=0.5)
    return made


def _weights(name: str, problem: ExpertsProblem, values: Values, rows: int, columns: int) -> Arguments:
    """One projection of all experts, with its scales."""
    experts, size = problem.num_experts, columns**-0.5
    if problem.weights == PLAIN:
        return {name: values.normal(experts, rows, columns, dtype=problem.dtype, size=size)}
    shape = scale_shapes(problem.weights, experts, rows, columns)[0]
    kind = scale_dtypes(problem.weights)[0]
    if problem.weights not in FOUR_BIT_FORMATS:
        codes = values.normal(experts, rows, columns, dtype=E4M3)
        return {name: codes, f"{name}_scale": values.near(*shape, size=size / 64, dtype=kind)}
    codes, nvfp4 = values.codes(experts, rows, columns // 2), problem.weights == NVFP4
    usual = 16.0 if nvfp4 else size / 8 if problem.weights == MXINT4 else size / 4
    made: Arguments = {name: codes, f"{name}_scale": values.near(*shape, size=usual, dtype=kind)}
    return made | ({f"{name}_global_scale": values.near(experts, size=size / 48)} if nvfp4 else {})
