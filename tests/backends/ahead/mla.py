"""Multi-head latent attention."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernelhub.backends.triton.mla.cache_adapter import Write
from kernelhub.backends.triton.mla.concat_adapter import Concat
from kernelhub.backends.triton.mla.latent_adapter import SplitKV, SplitKVFixed
from kernelhub.ops.arguments import lse_shape
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.attention.problem import FP8
from kernelhub.ops.mla.attention.adapter import MlaValues
from kernelhub.ops.mla.attention.problem import MlaProblem
from kernelhub.ops.mla.cache.problem import MlaCacheProblem
from kernelhub.ops.mla.concat.problem import ConcatProblem
from kernelhub.probes.device import DeviceFacts
from tests.backends.ahead.case import Case


def _concat(facets: dict[str, Any], device: DeviceFacts) -> None:
    """The keys of a chunk of prefill."""
    problem = ConcatProblem(device=device, **facets)
    heads, nope, rope = problem.num_heads, problem.nope_dim, problem.rope_dim
    dtype = getattr(torch, problem.dtype)
    k_nope = torch.empty(2048, heads, nope + 128, dtype=dtype, device="cuda").narrow(2, 0, nope)
    k_rope = torch.empty(2048, rope, dtype=dtype, device="cuda")
    Concat(problem).launch(k_nope, k_rope, torch.empty(2048, heads, nope + rope, dtype=dtype, device="cuda"))


def _cache(facets: dict[str, Any], device: DeviceFacts) -> None:
    """The tokens of a chunk of prefill."""
    problem = MlaCacheProblem(device=device, **facets)
    tokens = torch.empty(2048, 576, dtype=getattr(torch, problem.dtype), device="cuda")
    kv_cache = torch.empty(256, 64, 576, dtype=getattr(torch, problem.kv_dtype), device="cuda")
    slots = torch.empty(2048, dtype=torch.int64, device="cuda")
    scale = torch.empty(1, device="cuda") if problem.kv_scale == "tensor" else 0.5
    Write(problem).launch(tokens.narrow(1, 0, 512), tokens.narrow(1, 512, 64), kv_cache, slots, scale)


def _attention(facets: dict[str, Any], device: DeviceFacts, adapter: Any = SplitKV) -> None:
    """A step of four sequences, their keys split."""
    problem = MlaProblem(device=device, **facets)
    dtype = getattr(torch, problem.q_dtype)

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    rows = {"one": (4,), "few": (4, 2), "many": (4, 64), "any": (300,)}[problem.q_len]
    q = empty(*rows, problem.num_heads, problem.head_dim)
    kv_cache = empty(256, problem.page_size, problem.head_dim, dtype=getattr(torch, problem.kv_dtype))
    tables = (empty(4, 64, dtype=torch.int32), empty(4, dtype=torch.int32))
    step = PagedStep(*tables, empty(5, dtype=torch.int32) if problem.ragged else None)
    topk = empty(q.shape[:-2].numel(), 2048, dtype=torch.int32) if problem.sparse else None
    sinks = empty(problem.num_heads) if problem.sinks else None
    values = MlaValues(0.1, sinks, 0.5 if problem.kv_scale == "value" else empty(1, dtype=torch.float32))
    lse = empty(*lse_shape(q.shape), dtype=torch.float32) if problem.lse else None
    adapter(problem).launch(q, kv_cache, topk, step, values, empty(*q.shape[:-1], problem.value_dim), lse)


_FP8 = {"kv_dtype": FP8, "kv_scale": "value"}
_FLOAT32 = {"q_dtype": "float32", "kv_dtype": "float32"}
_ATTENTION: dict[str, dict[str, Any]] = {
    "128 heads": {},
    "16 heads": {"num_heads": 16},
    "128 heads, fp8": _FP8,
    "16 heads, fp8": _FP8 | {"num_heads": 16, "kv_scale": "tensor"},
    "128 heads, sparse": {"sparse": True},
    "16 heads, sparse, fp8": _FP8 | {"num_heads": 16, "sparse": True},
    "16 heads, 2 tokens": {"num_heads": 16, "q_len": "few", "causal": True},
    "128 heads, ragged": {"ragged": True, "q_len": "any", "causal": True},
    "128 heads, everything": _FP8
    | {"ragged": True, "q_len": "any", "causal": True, "sparse": True, "sinks": True, "lse": True},
    "256 + 64": {"head_dim": 320, "value_dim": 256},
    "128 + 32": {"head_dim": 160, "value_dim": 128, "num_heads": 16},
    "float32": _FLOAT32,
    "float32, 16 heads": _FLOAT32 | {"num_heads": 16},
    "float32, fp8": _FP8 | {"q_dtype": "float32", "num_heads": 16},
    "512 + 128": {"head_dim": 640},
    "512 + 128, 16 heads": {"head_dim": 640, "num_heads": 16},
    "512 without a rotary part": {"head_dim": 512},
}

CASES = [
    *(Case(f"concat {dtype}", functools.partial(_concat, {"dtype": dtype})) for dtype in ("bfloat16", "float8_e4m3fn")),
    Case("mla cache", functools.partial(_cache, {})),
    Case("mla cache, fp8", functools.partial(_cache, _FP8)),
    *(Case(f"mla {label}", functools.partial(_attention, facets)) for label, facets in _ATTENTION.items()),
    *(
        Case(f"mla in parts of the lengths alone, {label}", functools.partial(_attention, facets, adapter=SplitKVFixed))
        for label in ("128 heads", "16 heads, fp8", "128 heads, everything")
        for facets in (_ATTENTION[label],)
    ),
]
