"""Calls of many ops whose only free number is that of their tokens, as an engine makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import kernelhub
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.indexer.inputs import topk_inputs
from kernelhub.ops.merge.inputs import merge_inputs
from kernelhub.ops.mla.concat.inputs import concat_inputs
from kernelhub.ops.moe.routing.inputs import routing_inputs
from kernelhub.ops.quant.inputs import quantize_inputs

DECLARED = (1, 2, 4, 8, 16, 32, 64, 128)  # token counts that a warm-up is told


def attention(tokens: int, **more: Any) -> Any:
    q, kv = torch.zeros(1, tokens, 4, 16), torch.zeros(1, 128, 2, 16)
    return kernelhub.attention(q, kv, kv, **more)


def paged_attention(tokens: int, **more: Any) -> Any:
    """As many sequences as tokens, each of another length."""
    cache = torch.zeros(16, 16, 2, 16)
    lengths = torch.arange(1, tokens + 1, dtype=torch.int32)
    return kernelhub.paged_attention(
        torch.zeros(tokens, 4, 16), cache, cache, torch.zeros(tokens, 8, dtype=torch.int32), lengths, **more
    )


def ragged_attention(tokens: int) -> Any:
    offsets = torch.tensor([0, tokens // 2, tokens], dtype=torch.int32)
    q, kv = torch.zeros(tokens, 4, 16), torch.zeros(tokens, 2, 16)
    return kernelhub.attention(q, kv, kv, offsets, offsets, causal=True)


CALLS: dict[str, Callable[[int], Any]] = {
    "attention": attention,
    "ragged attention": ragged_attention,
    "paged_attention": paged_attention,
    "fp8_gemm": lambda tokens: kernelhub.fp8_gemm(**fp8_gemm_inputs(tokens=tokens, n=64, k=128)),
    "fp8_gemm in C++": lambda tokens: kernelhub.fp8_gemm(**fp8_gemm_inputs(tokens=tokens, n=64, k=128), backend="cpp"),
    "quantize_fp8": lambda tokens: kernelhub.quantize_fp8(**quantize_inputs(tokens=tokens, width=256)),
    "merge": lambda tokens: kernelhub.merge_attention_states(**merge_inputs(tokens=tokens, num_heads=2, head_dim=16)),
    "concat_mla_k": lambda tokens: kernelhub.concat_mla_k(**concat_inputs(tokens=tokens, num_heads=2)),
    "route_experts": lambda tokens: kernelhub.route_experts(**routing_inputs(tokens=tokens)),
    "topk_indices": lambda tokens: kernelhub.topk_indices(**topk_inputs(tokens=tokens, keys=64, k=8)),
}
OUTSIDE: dict[str, Callable[[], Any]] = {
    "softcap": lambda: attention(8, softcap=30.0),
    "another head_dim": lambda: kernelhub.attention(*torch.zeros(3, 1, 8, 4, 32)),
    "a window": lambda: paged_attention(4, window=3),
    "sinks": lambda: paged_attention(4, sinks=torch.zeros(4)),
    "log-sum-exp": lambda: attention(8, return_lse=True),
    "another N": lambda: kernelhub.fp8_gemm(**fp8_gemm_inputs(tokens=4, n=128, k=128)),
    "scales a tensor": lambda: kernelhub.fp8_gemm(**fp8_gemm_inputs(tokens=4, n=64, k=128, scaling="tensor")),
    "float16": lambda: kernelhub.fp8_gemm(**fp8_gemm_inputs(tokens=4, n=64, k=128, out_dtype=torch.float16)),
    "another model": lambda: kernelhub.route_experts(**routing_inputs("qwen3-30b-a3b", tokens=4)),
    "another backend": lambda: attention(8, backend="torch.blocked"),
    "a list of backends": lambda: attention(8, backend=["torch.blocked", "torch"]),
    "more parts": lambda: kernelhub.merge_attention_states(**merge_inputs(parts=3, tokens=4, num_heads=4, head_dim=16)),
}
