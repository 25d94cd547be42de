"""Records of the Triton kernels of attention."""

from __future__ import annotations

from kernelhub.backends.triton import standings
from kernelhub.backends.triton.requirements import MACHINE
from kernelhub.dispatch.constraint import Between, OneOf, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.attention.problem import ANY, FEW, FLOATS, MANY, ONE, QUANTISED

_WIDTH = "no tile of wider heads fits into shared memory"
_SHAPES = (
    dtype_in("q_dtype", *FLOATS),
    dtype_in("kv_dtype", *FLOATS, *QUANTISED),
    Between("head_dim_qk", 16, 256, why=_WIDTH),
    Between("head_dim_vo", 16, 256, why=_WIDTH),
    anything("num_q_heads", "num_kv_heads"),
)
_PAGES = Between("page_size", 1, 1 << 16)
_FEATURES = frozenset(
    {
        "ragged",
        "causal",
        "window_left",
        "window_right",
        "softcap",
        "sinks",
        "lse",
        "kv_scale=value",
        "kv_scale=tensor",
        "kv_scale=head",
    }
)
_DECODE = OneOf("q_len", (ONE, FEW), why="its programs hold all rows of a sequence")
_ANY_LENGTH = OneOf("q_len", (ONE, FEW, MANY, ANY))
_HERE = "kernelhub.backends.triton.attention.adapter"
_SOURCE = "FlashAttention-2 (Dao 2023), Flash-Decoding (Dao et al. 2023)"


KERNELS = (
    Kernel(
        op="attention",
        name="triton.prefill",
        target=f"{_HERE}:Prefill",
        summary="a tile of query rows per program, one pass over its keys",
        band=Band.PORTABLE,
        constraints=(*MACHINE, *_SHAPES, _ANY_LENGTH),
        features=_FEATURES,
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        source=_SOURCE,
        standings=standings.STANDINGS,
    ),
    Kernel(
        op="attention",
        name="triton.split_kv",
        target=f"{_HERE}:SplitKV",
        summary="few queries: keys split among programs, parts merged",
        band=Band.PORTABLE,
        constraints=(*MACHINE, *_SHAPES, _DECODE),
        features=_FEATURES,
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_SOURCE,
        standings=standings.STANDINGS,
    ),
    Kernel(
        op="paged_attention",
        name="triton.split_kv",
        target=f"{_HERE}:SplitKV",
        summary="decode: keys split among programs according to the device, parts merged",
        band=Band.PORTABLE,
        constraints=(*MACHINE, *_SHAPES, _PAGES, _DECODE),
        features=_FEATURES | {"kv_layout=HND"},
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_SOURCE,
        standings=standings.STANDINGS,
    ),
    Kernel(
        op="paged_attention",
        name="triton.split_kv_fixed",
        target=f"{_HERE}:SplitKVFixed",
        summary="decode: keys split by the length of each sequence only, independent of the batch",
        band=Band.PORTABLE,
        constraints=(*MACHINE, *_SHAPES, _PAGES, _DECODE),
        features=_FEATURES | {"kv_layout=HND"},
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        source=_SOURCE,
        standings=standings.STANDINGS,
    ),
    Kernel(
        op="paged_attention",
        name="triton.mixed",
        target=f"{_HERE}:Mixed",
        summary="ragged batches: decode rows by split KV, the others by prefill, separated on the device",
        band=Band.PORTABLE,
        constraints=(*MACHINE, *_SHAPES, _PAGES, _ANY_LENGTH, OneOf("ragged", (True,), why="needs cu_seqlens_q")),
        features=_FEATURES | {"kv_layout=HND"},
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_SOURCE,
        standings=standings.STANDINGS,
    ),
    Kernel(
        op="paged_attention",
        name="triton.prefill",
        target=f"{_HERE}:Prefill",
        summary="a tile of query rows per program, one pass over its pages",
        band=Band.PORTABLE,
        constraints=(*MACHINE, *_SHAPES, _PAGES, _ANY_LENGTH),
        features=_FEATURES | {"kv_layout=HND"},
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        source=_SOURCE,
        standings=standings.STANDINGS,
    ),
)
