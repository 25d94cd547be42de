"""Records of the C++ kernels of attention."""

from __future__ import annotations

from kernelhub.backends.cpp.requirements import MACHINE, STANDINGS
from kernelhub.dispatch.constraint import anything, dtype_in
from kernelhub.dispatch.kernel import Band, Kernel
from kernelhub.ops.attention.problem import FLOATS, FP8, QUANTISED

_SUMMARY = "keys and values are read once, in place, pieces of a sequence at the same time"
_MASKS = frozenset({"ragged", "causal", "window_left", "window_right", "softcap", "sinks", "lse"})
_KV_SCALES = frozenset({"kv_scale=value", "kv_scale=tensor", "kv_scale=head"})
_KV = (dtype_in("q_dtype", *FLOATS), dtype_in("kv_dtype", *FLOATS, *QUANTISED))

KERNELS = (
    Kernel(
        op="attention",
        name="cpp.split_kv",
        target="kernelhub.backends.cpp.attention.adapter:SplitKV",
        summary=_SUMMARY,
        band=Band.TUNED,
        constraints=(*MACHINE, *_KV, anything("num_q_heads", "num_kv_heads", "q_len", "head_dim_qk", "head_dim_vo")),
        features=_MASKS | _KV_SCALES,
        deterministic=True,
        standings=STANDINGS,
    ),
    Kernel(
        op="paged_attention",
        name="cpp.split_kv",
        target="kernelhub.backends.cpp.attention.adapter:SplitKVPaged",
        summary=_SUMMARY,
        band=Band.TUNED,
        constraints=(
            *MACHINE,
            *_KV,
            anything("num_q_heads", "num_kv_heads", "q_len", "head_dim_qk", "head_dim_vo", "page_size"),
        ),
        features=_MASKS | _KV_SCALES | {"kv_layout=HND"},
        deterministic=True,
        standings=STANDINGS,
    ),
    Kernel(
        op="mla_attention",
        name="cpp.split_kv",
        target="kernelhub.backends.cpp.attention.adapter:SplitKVLatent",
        summary=f"{_SUMMARY}; 32 heads share a row",
        band=Band.TUNED,
        constraints=(
            *MACHINE,
            dtype_in("q_dtype", *FLOATS),
            dtype_in("kv_dtype", *FLOATS, FP8),
            anything("num_heads", "head_dim", "value_dim", "page_size", "q_len"),
        ),
        features=frozenset({"ragged", "causal", "sparse", "sinks", "lse", "kv_scale=value", "kv_scale=tensor"}),
        deterministic=True,
        standings=STANDINGS,
    ),
)
