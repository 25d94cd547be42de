"""Mixtures of experts: routing, and every format of weights with few rows and with many."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernelhub.backends.triton.moe.experts_adapter import Experts
from kernelhub.backends.triton.moe.routing_adapter import Routing
from kernelhub.ops.models.shapes import MOE
from kernelhub.ops.moe.experts.adapter import Values
from kernelhub.ops.moe.experts.problem import (
    BLOCK_FORMATS,
    FP8_BLOCK_UE8M0,
    FP8_FORMATS,
    MXFP4,
    MXINT4,
    NVFP4,
    PLAIN,
    ExpertsProblem,
)
from kernelhub.ops.moe.experts.weights import GROUP, Matrix
from kernelhub.ops.moe.routing.problem import RoutingProblem
from kernelhub.probes.device import DeviceFacts
from tests.backends.ahead.case import Case


def _route(model: str, dtype: str, device: DeviceFacts) -> None:
    layer = MOE[model]
    problem = RoutingProblem(
        device=device,
        dtype=dtype,
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        num_groups=layer.num_groups,
        topk_groups=layer.topk_groups,
        scoring=layer.scoring,
        correction_bias=layer.correction_bias,
        renormalize=layer.renormalize,
    )
    logits = torch.empty(1024, layer.num_experts, dtype=getattr(torch, dtype), device="cuda")
    bias = torch.empty(layer.num_experts, device="cuda") if layer.correction_bias else None
    weights = torch.empty(1024, layer.top_k, device="cuda")
    Routing(problem).launch(logits, bias, 2.5, weights, weights.to(torch.int32))


def _matrix(problem: ExpertsProblem, rows: int, columns: int, biased: bool) -> Matrix:
    """One projection, as `ops.moe.experts.weights.matrix` gives it."""
    experts, kind = problem.num_experts, problem.weights

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    bias = empty(experts, rows) if biased else None
    if kind == PLAIN:
        return Matrix(empty(experts, rows, columns, dtype=getattr(torch, problem.dtype)), None, None, bias)
    if kind in FP8_FORMATS:
        weight = empty(experts, rows, columns, dtype=torch.float8_e4m3fn)
        if kind in BLOCK_FORMATS:
            dtype = torch.uint8 if kind == FP8_BLOCK_UE8M0 else torch.float32
            return Matrix(weight, empty(experts, -(-rows // 128), -(-columns // 128), dtype=dtype), None, bias)
        return Matrix(weight, None, empty(experts, rows), bias)
    weight = empty(experts, rows, columns // 2, dtype=torch.uint8)
    held = torch.bfloat16 if kind == MXINT4 else torch.uint8
    scale = empty(experts, rows, columns // GROUP[kind], dtype=held)
    if kind in (MXFP4, MXINT4):
        return Matrix(weight, scale, None, bias)
    assert kind == NVFP4
    return Matrix(weight, scale.view(torch.float8_e4m3fn), empty(experts, 1).expand(experts, rows), bias)


def _experts(tokens: int, facets: dict[str, Any], device: DeviceFacts) -> None:
    """A layer on as many tokens as choose the tiles."""
    problem = ExpertsProblem(device=device, **facets)
    hidden, inner = problem.hidden_size, problem.intermediate_size
    x = torch.empty(tokens, hidden, dtype=getattr(torch, problem.dtype), device="cuda")
    router = torch.empty(tokens, problem.top_k, device="cuda")
    one = torch.empty(1, device="cuda") if problem.static_scales else None
    table = torch.empty(256, dtype=torch.int32, device="cuda") if problem.expert_map else None
    values = Values(one, one, expert_map=table, residual=x if problem.residual else None)
    w13, w2 = _matrix(problem, 2 * inner, hidden, problem.w13_bias), _matrix(problem, hidden, inner, problem.w2_bias)
    Experts(problem).launch(x, w13, w2, router, router.to(torch.int32), values, torch.empty_like(x))


_FEW, _MANY = 8, 4096
_QWEN: dict[str, Any] = {}
_DEEPSEEK = {"num_experts": 256, "hidden_size": 7168, "intermediate_size": 256}
_OSS = {
    "num_experts": 128,
    "top_k": 4,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "activation": "swiglu_oai",
    "w13_bias": True,
    "w2_bias": True,
    "weights": "mxfp4",
}
# Kimi K2 on one of 8 ranks.
_KIMI = {"num_experts": 384, "hidden_size": 7168, "intermediate_size": 256, "weights": "mxint4"}
_FP8 = {"activation_dtype": "float8_e4m3fn"}
_LAYERS: dict[str, dict[str, Any]] = {
    "bf16": _QWEN,
    "bf16, here and there": _QWEN | {"expert_map": True, "residual": True, "activation": "gelu"},
    "fp32": {"dtype": "float32", "activation_dtype": "float32"},
    "fp16": {"dtype": "float16", "activation_dtype": "float16"},
    "fp8 block": {**_DEEPSEEK, **_FP8, "weights": "fp8_block"},
    "fp8 block ue8m0, bf16 tokens": {**_DEEPSEEK, "weights": "fp8_block_ue8m0"},
    "fp8 channel": {**_FP8, "weights": "fp8_channel"},
    "fp8 tensor, static": {**_FP8, "weights": "fp8_tensor", "static_scales": True},
    "fp8 channel, bf16 tokens": {"weights": "fp8_channel"},
    "mxfp4": _OSS,
    "nvfp4": {"weights": "nvfp4"},
    "mxint4": _KIMI,
}

CASES = [
    *(
        Case(f"routing of {model}", functools.partial(_route, model, dtype))
        for model, dtype in (
            ("deepseek-v3.2", "float32"),
            ("deepseek-v2", "bfloat16"),
            ("gpt-oss-120b", "bfloat16"),
            ("qwen3-30b-a3b", "float32"),
        )
    ),
    *(
        Case(f"experts {name}, {tokens} tokens", functools.partial(_experts, tokens, facets))
        for name, facets in _LAYERS.items()
        for tokens in (_FEW, _MANY)
    ),
    *(
        Case(f"experts {name}, 1024 tokens, as measured on Hopper", functools.partial(_experts, 1024, _LAYERS[name]))
        for name in ("fp8 block", "mxfp4")
    ),
]
