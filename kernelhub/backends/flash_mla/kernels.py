"""Records of FlashMLA's kernels."""

from __future__ import annotations

from typing import Any

from kernelhub.backends.flash_mla.requirements import PACKAGES, Offers
from kernelhub.dispatch.constraint import Between, OnDevice, OneOf, SameValue, anything, dtype_in
from kernelhub.dispatch.kernel import Backend, Band, GraphLevel, Kernel
from kernelhub.dispatch.standing import published, verified
from kernelhub.ops.attention.problem import ANY, FEW, MANY, ONE

_H200 = verified(
    "hopper",
    evidence="NVIDIA H200, 2026-11-23, torch 2.11.0+cu130, tokenspeed-flashmla 1.0.0.post20260615: 270 tests passed; "
    "2026-11-21, sgl-flash-mla 1.0.0: 267 tests passed (benchmarks/results/libraries_h200.json)",
)

DENSE = (_H200,)
LISTED = (
    _H200,
    published(
        "blackwell",
        evidence="FlashMLA's prefill of listed tokens is for sm_90 and sm_100; its authors measured up to 1450 TFLOP/s "
        "on a B200 and 640 on an H800: https://github.com/deepseek-ai/FlashMLA#performance",
        figure="1450 TFLOP/s on a B200, 640 on an H800",
    ),
)


BACKEND = Backend(
    name="flash_mla",
    summary="FlashMLA: DeepSeek's kernels of latent attention",
    package="flash_mla",
    homepage="https://github.com/deepseek-ai/FlashMLA",
)


_OTHER_CACHE = "its fp8 cache has another layout, of 656 bytes per token"
_SOURCE = "FlashMLA (DeepSeek 2025)"
_LISTED = (
    OnDevice("nvidia", only=((9, 0), (10, 0))),
    *PACKAGES,
    Offers("sparse"),
    dtype_in("q_dtype", "bfloat16"),
    SameValue("q_dtype", "kv_dtype", why=_OTHER_CACHE),
    OneOf("head_dim", (576,), why="the width it is compiled for"),
    OneOf("value_dim", (512,), why="the width it is compiled for"),
    Between("page_size", 1, 1 << 16),
    OneOf("q_len", (ONE, FEW, MANY, ANY)),
    OneOf("sparse", (True,), why="needs topk_indices"),
)
_SPARSE: dict[str, Any] = {
    "band": Band.SPECIALISED,
    "features": frozenset({"ragged", "causal", "sparse", "sinks", "lse"}),
    "graph": GraphLevel.FULL,
    "deterministic": True,
    "batch_invariant": True,
    "source": _SOURCE,
}

KERNELS = (
    Kernel(
        op="mla_attention",
        name="flash_mla.dense",
        target="kernelhub.backends.flash_mla.dense:Dense",
        summary="FlashMLA's decode: tiles of 64 rows, keys split among multiprocessors by a schedule made once a step",
        band=Band.SPECIALISED,
        constraints=(
            OnDevice("nvidia", only=((9, 0),)),
            *PACKAGES,
            Offers("dense"),
            dtype_in("q_dtype", "bfloat16", "float16"),
            SameValue("q_dtype", "kv_dtype", why=_OTHER_CACHE),
            OneOf("head_dim", (576,), why="the width it is compiled for"),
            OneOf("value_dim", (512,), why="the width it is compiled for"),
            OneOf("page_size", (64,), why="the size it is compiled for"),
            OneOf("q_len", (ONE, FEW, MANY)),
            anything("num_heads"),
        ),
        features=frozenset({"causal", "sinks", "lse"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_SOURCE,
        standings=DENSE,
    ),
    Kernel(
        op="mla_attention",
        name="flash_mla.sparse",
        target="kernelhub.backends.flash_mla.sparse:Sparse",
        summary="FlashMLA's attention to listed tokens, each query token by itself",
        constraints=(*_LISTED, OneOf("num_heads", (64, 128), why="the sizes it is compiled for")),
        **_SPARSE,
        standings=LISTED,
    ),
    Kernel(
        op="mla_attention",
        name="flash_mla.sparse_padded",
        target="kernelhub.backends.flash_mla.sparse:Sparse",
        summary="the same for fewer heads, padded to 64 or 128",
        constraints=(*_LISTED, Between("num_heads", 1, 127, why="the kernel supports up to 128")),
        **_SPARSE,
        standings=LISTED,
    ),
)
