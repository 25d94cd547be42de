"""Prefill of attention."""

from __future__ import annotations

import functools
from typing import Any

from kernelhub.backends.gluon.attention.float8_adapter import PrefillOfFloat8
from kernelhub.backends.gluon.attention.pipelined_adapter import PipelinedPrefill
from kernelhub.ops.attention.problem import ANY, MANY
from tests.backends.ahead.attention import launch
from tests.backends.ahead.case import Case

_PLAIN: dict[str, Any] = {"head_dim_qk": 128, "head_dim_vo": 128, "num_q_heads": 32, "num_kv_heads": 8, "q_len": MANY}
_EVERYTHING = {"causal": True, "window_left": True, "softcap": True, "sinks": True, "lse": True}
_64 = {"head_dim_qk": 64, "head_dim_vo": 64}
_FP8: dict[str, Any] = {"kv_dtype": "float8_e4m3fn", "page_size": 64, "causal": True}
_FLOAT16: dict[str, Any] = {"q_dtype": "float16", "kv_dtype": "float16"}
_E5M2: dict[str, Any] = {"kv_dtype": "float8_e5m2", "kv_scale": "value"}
_DENSE_FP8: dict[str, Any] = {"kv_dtype": "float8_e4m3fn", "causal": True}
_96 = {"head_dim_qk": 96, "head_dim_vo": 96}
_256 = {"head_dim_qk": 256, "head_dim_vo": 256}
_192 = {"head_dim_qk": 192, "head_dim_vo": 128, "num_kv_heads": 32}


def _case(name: str, facets: dict[str, Any], paged: bool = False) -> Case:
    return Case(name, functools.partial(launch, PrefillOfFloat8, _PLAIN | facets, paged))


def _pipelined(name: str, facets: dict[str, Any], paged: bool = False) -> Case:
    return Case(f"pipelined prefill, {name}", functools.partial(launch, PipelinedPrefill, _PLAIN | facets, paged))


CASES = [
    _case("gluon prefill, fp8", {**_FP8, "kv_scale": "value"}, paged=True),
    _case(
        "gluon prefill, fp8, ragged, pages of 16",
        {**_FP8, "kv_scale": "tensor", "ragged": True, "q_len": ANY, "page_size": 16},
        paged=True,
    ),
    _case("gluon prefill, fp8, 96", {**_FP8, "kv_scale": "value", **_96}, paged=True),
    _case(
        "gluon prefill, fp8, everything, 96, pages of 16",
        {**_FP8, "kv_scale": "head", "ragged": True, "q_len": ANY, **_EVERYTHING, **_96, "page_size": 16},
        paged=True,
    ),
    _case("gluon prefill, fp8, dense", {**_DENSE_FP8, "kv_scale": "value"}),
    _case(
        "gluon prefill, fp8, dense, everything",
        {**_DENSE_FP8, "kv_scale": "head", "ragged": True, "q_len": ANY, **_EVERYTHING},
    ),
    _case("gluon prefill, fp8, everything, 64", {**_FP8, "kv_scale": "head", **_EVERYTHING, **_64}, paged=True),
    _case("gluon prefill, e5m2, pages of 128", {**_FP8, **_E5M2, "softcap": True, "page_size": 128}, paged=True),
    _pipelined("causal", {"causal": True}),
    _pipelined("not causal", {}),
    _pipelined("everything", {"ragged": True, "q_len": ANY, **_EVERYTHING}),
    _pipelined("64", {"causal": True, **_64}),
    _pipelined("256", {"causal": True, **_256}),
    _pipelined("192 for 128", {"causal": True, **_192}),
    _pipelined("everything, 192 for 128", {"ragged": True, "q_len": ANY, **_EVERYTHING, **_192}),
    _pipelined("96", {"causal": True, **_96}),
    _pipelined("pages of 16", {"causal": True, "ragged": True, "q_len": ANY, "page_size": 16}, paged=True),
    _pipelined("pages of 256, float16", {"causal": True, "page_size": 256, **_FLOAT16}, paged=True),
    _pipelined(
        "everything, 256, pages of 64",
        {"ragged": True, "q_len": ANY, "page_size": 64, **_EVERYTHING, **_256},
        paged=True,
    ),
]
