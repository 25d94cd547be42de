"""Decode of latent attention."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernelhub.backends.gluon.mla.adapter import Decode, DecodeFloat8
from kernelhub.backends.gluon.mla.listed_adapter import Listed, ListedFloat8
from kernelhub.ops.arguments import lse_shape
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.mla.attention.adapter import MlaValues
from kernelhub.ops.mla.attention.problem import MlaProblem
from kernelhub.probes.device import DeviceFacts
from tests.backends.ahead.case import Case


def _launch(facets: dict[str, Any], device: DeviceFacts) -> None:
    """A step of four sequences, their keys shared among programs."""
    problem = MlaProblem(device=device, **facets)

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    q = empty(*((4,) if problem.q_len in ("one", "any") else (4, 2)), problem.num_heads, 576)
    offsets = empty(5, dtype=torch.int32) if problem.ragged else None
    step = PagedStep(empty(4, 64, dtype=torch.int32), empty(4, dtype=torch.int32), offsets)
    lse = empty(*lse_shape(q.shape), dtype=torch.float32) if problem.lse else None
    kv_dtype = getattr(torch, problem.kv_dtype)
    kv_scale = {"tensor": empty(1, dtype=torch.float32), "value": 0.5, None: None}[problem.kv_scale]
    values = MlaValues(0.1, empty(problem.num_heads) if problem.sinks else None, kv_scale)
    count = q.numel() // (problem.num_heads * 576)
    lists = empty(count, 2048, dtype=torch.int32) if problem.sparse else None
    dense = DecodeFloat8 if problem.kv_scale else Decode
    adapter = (ListedFloat8 if problem.kv_scale else Listed) if problem.sparse else dense
    cache = empty(256, problem.page_size, 576, dtype=kv_dtype)
    adapter(problem).launch(q, cache, lists, step, values, empty(*q.shape[:-1], 512), lse)


_FLOAT8 = {"kv_dtype": "float8_e4m3fn", "kv_scale": "value"}
_EVERYTHING = {"q_len": "few", "causal": True, "sinks": True, "lse": True, "num_heads": 16}
_LISTED_FLOAT8 = {**_FLOAT8, "sparse": True}
CASES = [
    Case("mla decode, 128 heads", functools.partial(_launch, {})),
    Case("mla decode, 16 heads", functools.partial(_launch, {"num_heads": 16, "lse": True})),
    Case(
        "mla decode, 2 tokens, everything",
        functools.partial(_launch, {"q_len": "few", "causal": True, "sinks": True, "lse": True}),
    ),
    Case("mla decode of lists, 128 heads", functools.partial(_launch, {"sparse": True})),
    Case(
        "mla decode of lists, ragged",
        functools.partial(_launch, {"sparse": True, "ragged": True, "q_len": "any", "causal": True, "page_size": 16}),
    ),
    Case(
        "mla decode of lists, 2 tokens, everything",
        functools.partial(
            _launch, {"q_len": "few", "causal": True, "sinks": True, "lse": True, "num_heads": 16, "sparse": True}
        ),
    ),
    Case("mla decode, float8, 128 heads", functools.partial(_launch, _FLOAT8)),
    Case("mla decode, float8, 16 heads", functools.partial(_launch, {**_FLOAT8, "num_heads": 16, "lse": True})),
    *(
        Case(
            f"mla decode, float8, 2 tokens of {heads} heads, everything",
            functools.partial(_launch, {**_FLOAT8, **_EVERYTHING, "num_heads": heads, "kv_scale": "tensor"}),
        )
        for heads in (8, 16, 64)
    ),
    Case("mla decode of lists, float8, 128 heads", functools.partial(_launch, _LISTED_FLOAT8)),
    Case(
        "mla decode of lists, float8, ragged",
        functools.partial(_launch, {**_LISTED_FLOAT8, "ragged": True, "q_len": "any", "causal": True, "page_size": 16}),
    ),
    Case(
        "mla decode of lists, float8, 2 tokens, everything",
        functools.partial(
            _launch,
            {**_LISTED_FLOAT8, **_EVERYTHING, "kv_scale": "tensor"},
        ),
    ),
]
