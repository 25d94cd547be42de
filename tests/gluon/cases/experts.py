"""Experts: both products of a layer, and the launches around them."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernelhub.backends.gluon.moe.adapter import Experts
from kernelhub.backends.gluon.moe.halves_adapter import ExpertsOfHalves
from kernelhub.ops.moe.experts.adapter import Values
from kernelhub.ops.moe.experts.problem import FP8, FP8_BLOCK, FP8_BLOCK_UE8M0, PLAIN, ExpertsProblem
from kernelhub.ops.moe.experts.weights import Matrix
from kernelhub.probes.device import DeviceFacts
from tests.backends.ahead.case import Case


def _launch(tokens: int, facets: dict[str, Any], device: DeviceFacts) -> None:
    """32 experts of a layer."""
    usual: dict[str, Any] = {"weights": FP8_BLOCK, "activation_dtype": FP8, "num_experts": 32}
    sizes = {"hidden_size": 7168, "intermediate_size": 2048}
    problem = ExpertsProblem(device=device, **{**usual, **sizes, **facets})
    experts, hidden, inner = problem.num_experts, problem.hidden_size, problem.intermediate_size
    dtype = getattr(torch, problem.dtype)

    def empty(shape: tuple[int, ...], of: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="cuda")

    def matrix(rows: int, columns: int, bias: bool) -> Matrix:
        of_bias = empty((experts, rows), dtype) if bias else None
        if problem.weights == PLAIN:
            return Matrix(empty((experts, rows, columns), dtype), None, None, of_bias)
        scale = torch.uint8 if problem.weights == FP8_BLOCK_UE8M0 else torch.float32
        return Matrix(
            empty((experts, rows, columns), torch.float8_e4m3fn),
            empty((experts, -(-rows // 128), -(-columns // 128)), scale),
            None,
            of_bias,
        )

    x, out = empty((tokens, hidden), dtype), empty((tokens, hidden), dtype)
    table = empty((4 * experts,), torch.int32) if problem.expert_map else None
    adapter = ExpertsOfHalves if problem.weights == PLAIN else Experts
    adapter(problem).launch(
        x,
        matrix(2 * inner, hidden, problem.w13_bias),
        matrix(hidden, inner, problem.w2_bias),
        empty((tokens, problem.top_k), torch.float32),
        empty((tokens, problem.top_k), torch.int32),
        Values(expert_map=table, residual=x if problem.residual else None),
        out,
    )


_ALL: dict[str, Any] = {
    "activation": "swiglu_oai",
    "weights": FP8_BLOCK_UE8M0,
    **dict.fromkeys(("w13_bias", "w2_bias", "apply_router_weight_on_input", "expert_map", "residual"), True),
}
_HALVES: dict[str, Any] = {"weights": PLAIN, "activation_dtype": "bfloat16"}
_FLOAT16: dict[str, Any] = {**_HALVES, "dtype": "float16", "activation_dtype": "float16"}
_ALL_OF_HALVES: dict[str, Any] = {**_ALL, **_HALVES, "hidden_size": 2888, "intermediate_size": 360}
CASES = [
    Case("experts, 4096 tokens", functools.partial(_launch, 4096, {})),
    Case("experts, 64 tokens", functools.partial(_launch, 64, {})),
    Case("experts, 4096 tokens, every feature", functools.partial(_launch, 4096, _ALL)),
    Case("experts, 64 tokens, gelu", functools.partial(_launch, 64, {"activation": "gelu"})),
    Case("experts, 4096 tokens of float32", functools.partial(_launch, 4096, {"dtype": "float32"})),
    Case("experts, 4096 tokens of float16", functools.partial(_launch, 4096, {"dtype": "float16"})),
    Case("experts of bf16, 4096 tokens", functools.partial(_launch, 4096, _HALVES)),
    Case("experts of bf16, 64 tokens", functools.partial(_launch, 64, _HALVES)),
    Case("experts of bf16, 4096 tokens, every feature", functools.partial(_launch, 4096, _ALL_OF_HALVES)),
    Case("experts of bf16, 64 tokens, gelu", functools.partial(_launch, 64, {**_HALVES, "activation": "gelu"})),
    Case("experts of fp16, 4096 tokens", functools.partial(_launch, 4096, _FLOAT16)),
]
