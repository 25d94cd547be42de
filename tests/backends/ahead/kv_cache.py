"""Writes of new tokens to a KV cache."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernelhub.backends.triton.kv_cache.adapter import Write
from kernelhub.backends.triton.kv_cache.rope_adapter import RopeWrite
from kernelhub.ops.attention.problem import FP8
from kernelhub.ops.kv_cache.problem import KvCacheProblem
from kernelhub.ops.kv_cache.rope import Rope
from kernelhub.probes.device import DeviceFacts
from tests.backends.ahead.case import Case


def _launch(facets: dict[str, Any], device: DeviceFacts) -> None:
    """The tokens of a chunk of prefill, views of a projection's result."""
    problem = KvCacheProblem(device=device, **facets)
    heads, qk, vo = problem.num_kv_heads, problem.head_dim_qk, problem.head_dim_vo
    made = torch.empty(2048, heads * (qk + vo), dtype=getattr(torch, problem.dtype), device="cuda")
    k, v = (part.unflatten(1, (heads, -1)) for part in made.split([heads * qk, heads * vo], 1))
    kind = getattr(torch, problem.kv_dtype)
    caches = [torch.empty(256, problem.page_size, heads, width, dtype=kind, device="cuda") for width in (qk, vo)]
    count = {"head": heads, "tensor": 1}.get(problem.kv_scale or "")
    scale: Any = torch.empty(count, device="cuda") if count else 0.5 if problem.kv_scale else None
    slots, embedding = torch.empty(2048, dtype=torch.int64, device="cuda"), []
    if problem.rope is not None:
        q = torch.empty(2048, 4 * heads, qk, dtype=k.dtype, device="cuda") if problem.q else None
        embedding = [Rope(slots, torch.empty(8192, problem.rotary_dim, device="cuda"), q)]
    adapter = Write if problem.rope is None else RopeWrite
    adapter(problem).launch(k, v, *caches, slots, scale, scale, *embedding)


CASES = [
    Case("kv cache", functools.partial(_launch, {})),
    Case(
        "kv cache, fp8, 192 and 128",
        functools.partial(_launch, {"kv_dtype": FP8, "kv_scale": "value", "head_dim_qk": 192}),
    ),
    Case("kv cache, e5m2, by head", functools.partial(_launch, {"kv_dtype": "float8_e5m2", "kv_scale": "head"})),
    *(
        Case(f"kv cache, rope {rope}", functools.partial(_launch, {"rope": rope, "rotary_dim": dim, "q": True}))
        for rope, dim in (("neox", 128), ("interleaved", 64))
    ),
    Case(
        "kv cache, rope to fp8",
        functools.partial(_launch, {"rope": "neox", "rotary_dim": 128, "kv_dtype": FP8, "kv_scale": "head"}),
    ),
]
