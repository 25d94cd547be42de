"""Attention: tiles of every width, every feature, every dtype."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernelhub.backends.triton.attention import adapter as adapters
from kernelhub.ops.arguments import lse_shape
from kernelhub.ops.attention.adapter import DenseStep, PagedStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.problem import ANY, FEW, MANY, ONE, DenseAttentionProblem, PagedAttentionProblem
from kernelhub.probes.device import DeviceFacts
from tests.backends.ahead.case import Case

_PLAIN: dict[str, Any] = {"head_dim_qk": 128, "head_dim_vo": 128, "num_q_heads": 32, "num_kv_heads": 8}
_E5M2 = {"kv_dtype": "float8_e5m2", "kv_scale": "value"}
_FLOAT32: dict[str, Any] = {"q_dtype": "float32", "kv_dtype": "float32"}
_WINDOW: dict[str, Any] = {"causal": True, "window_left": True, "sinks": True}
_EVERYTHING: dict[str, Any] = {
    "causal": True,
    "window_left": True,
    "softcap": True,
    "sinks": True,
    "lse": True,
}


def _width(qk: int, vo: int) -> dict[str, Any]:
    return _PLAIN | {"head_dim_qk": qk, "head_dim_vo": vo}


def _cases() -> list[Case]:
    result = []
    for qk, vo in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)):
        wide = _width(qk, vo) | {"causal": True}
        result.append(_case(f"prefill {qk}/{vo}", adapters.Prefill, wide | {"q_len": MANY}, paged=False))
        result.append(_case(f"paged prefill {qk}/{vo}", adapters.Prefill, wide | {"q_len": MANY}))
        result.append(_case(f"decode {qk}/{vo}", adapters.SplitKV, _width(qk, vo) | {"q_len": ONE}))
    result += [
        _case("windowed prefill 64/64", adapters.Prefill, _width(64, 64) | _WINDOW | {"q_len": MANY}, paged=False),
        _case("windowed decode 64/64", adapters.SplitKV, _width(64, 64) | _WINDOW | {"causal": False, "q_len": ONE}),
        _case("ragged prefill", adapters.Prefill, _PLAIN | {"causal": True, "ragged": True, "q_len": ANY}, paged=False),
        _case("mixed", adapters.Mixed, _PLAIN | {"causal": True, "ragged": True, "q_len": ANY}),
        _case("prefill, everything", adapters.Prefill, _PLAIN | _EVERYTHING | {"q_len": MANY}),
        _case("decode, everything", adapters.SplitKV, _PLAIN | _EVERYTHING | {"causal": False, "q_len": ONE}),
        _case(
            "prefill fp8", adapters.Prefill, _PLAIN | {"kv_dtype": "float8_e4m3fn", "kv_scale": "head", "q_len": MANY}
        ),
        _case(
            "decode fp8", adapters.SplitKV, _PLAIN | {"kv_dtype": "float8_e4m3fn", "kv_scale": "value", "q_len": ONE}
        ),
        _case("prefill e5m2", adapters.Prefill, _PLAIN | _E5M2 | {"q_len": MANY}),
        _case("decode e5m2", adapters.SplitKV, _PLAIN | _E5M2 | {"q_len": ONE}),
        _case("prefill float32", adapters.Prefill, _PLAIN | _FLOAT32 | {"q_len": MANY}),
        _case("decode float32", adapters.SplitKV, _PLAIN | _FLOAT32 | {"q_len": ONE}),
        _case("decode float32 256", adapters.SplitKV, _width(256, 256) | _FLOAT32 | {"q_len": ONE}),
        _case(
            "decode, 64 heads of 256",
            adapters.SplitKV,
            _width(256, 256) | {"num_q_heads": 64, "num_kv_heads": 1, "q_len": ONE},
        ),
        _case("speculative decode", adapters.SplitKV, _PLAIN | {"causal": True, "q_len": FEW}),
        _case("prefill float32 256", adapters.Prefill, _width(256, 256) | _FLOAT32 | {"q_len": MANY}),
        _case("decode, 16 heads a group", adapters.SplitKV, _PLAIN | {"num_kv_heads": 2, "q_len": ONE}),
        _case(
            "decode, 64 heads a group", adapters.SplitKV, _PLAIN | {"num_q_heads": 64, "num_kv_heads": 1, "q_len": ONE}
        ),
        _case("decode in parts of the lengths alone", adapters.SplitKVFixed, _PLAIN | {"q_len": ONE}),
        *(
            _case(f"dense decode {width}/{width}", adapters.SplitKV, _width(width, width) | {"q_len": ONE}, paged=False)
            for width in (64, 128, 256)
        ),
        _case("dense decode, everything", adapters.SplitKV, _PLAIN | _EVERYTHING | {"q_len": FEW}, paged=False),
        _case("dense decode float32", adapters.SplitKV, _PLAIN | _FLOAT32 | {"q_len": ONE}, paged=False),
        _case("decode, page 3", adapters.SplitKV, _PLAIN | {"page_size": 3, "q_len": ONE}),
    ]
    return result


def _case(name: str, adapter: type[Any], facets: dict[str, Any], paged: bool = True) -> Case:
    return Case(name, functools.partial(launch, adapter, facets, paged))


def launch(adapter: type[Any], facets: dict[str, Any], paged: bool, device: DeviceFacts) -> None:
    """A serving-sized call."""
    problem_type = PagedAttentionProblem if paged else DenseAttentionProblem
    problem = problem_type(device=device, **facets)
    q_dtype, kv_dtype = getattr(torch, problem.q_dtype), getattr(torch, problem.kv_dtype)
    heads, kv_heads = problem.num_q_heads, problem.num_kv_heads
    seqs, tokens = 4, 512

    def empty(*shape: int, dtype: torch.dtype = q_dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    offsets = empty(seqs + 1, dtype=torch.int32) if problem.ragged else None
    queries = {ONE: 1, FEW: 8}.get(problem.q_len, tokens)
    rows = (seqs * tokens,) if problem.ragged else (seqs,) if queries == 1 and paged else (seqs, queries)
    q = empty(*rows, heads, problem.head_dim_qk)
    if isinstance(problem, PagedAttentionProblem):
        pages = (1024, problem.page_size, kv_heads)
        k, v = empty(*pages, problem.head_dim_qk, dtype=kv_dtype), empty(*pages, problem.head_dim_vo, dtype=kv_dtype)
        table, lengths = empty(seqs, 256, dtype=torch.int32), empty(seqs, dtype=torch.int32)
        step: Any = PagedStep(table, lengths, offsets)
    else:
        kv_rows = (seqs * tokens,) if problem.ragged else (seqs, tokens)
        k = empty(*kv_rows, kv_heads, problem.head_dim_qk, dtype=kv_dtype)
        v = empty(*kv_rows, kv_heads, problem.head_dim_vo, dtype=kv_dtype)
        step = DenseStep(offsets, offsets)
    per_head = empty(kv_heads, dtype=torch.float32) if problem.kv_scale == "head" else None
    scale = 0.5 if problem.kv_scale == "value" else per_head
    values = Values(
        scale=0.1,
        window_left=100 if problem.window_left else -1,
        window_right=0 if problem.causal else -1,
        softcap=30.0 if problem.softcap else 0.0,
        sinks=empty(heads) if problem.sinks else None,
        k_scale=scale,
        v_scale=scale,
    )
    lse = empty(*lse_shape(q.shape), dtype=torch.float32) if problem.lse else None
    adapter(problem).launch(q, k, v, step, values, empty(*rows, heads, problem.head_dim_vo), lse)


CASES = _cases()
