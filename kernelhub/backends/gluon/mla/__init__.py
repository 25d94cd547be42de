"""Records of the Gluon kernels of multi-head latent attention."""

from __future__ import annotations

from kernelhub.backends.gluon.requirements import MACHINE
from kernelhub.backends.gluon.standings import standings
from kernelhub.dispatch.constraint import OneOf, SameValue, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.attention.problem import ANY, FEW, FP8, MANY, ONE
from kernelhub.ops.mla.attention.problem import KV_SCALES

_WRITTEN = "the width that it is written for"

_QUERIES = (*MACHINE, dtype_in("q_dtype", "bfloat16"))
_WIDTHS = (OneOf("head_dim", (576,), why=_WRITTEN), OneOf("value_dim", (512,), why=_WRITTEN))
_PAGES = (
    OneOf("page_size", (64,), why="a step is a pair of pages of 64"),
    OneOf("q_len", (ONE, FEW), why="its programs walk all keys of a sequence"),
    anything("num_heads"),
)
_LISTS = (
    OneOf("sparse", (True,), why="it walks lists of tokens"),
    OneOf("q_len", (ONE, FEW, MANY, ANY)),
    anything("num_heads", "page_size"),
)
_SCALES = frozenset(f"kv_scale={form}" for form in KV_SCALES)
_SOURCE = "FlashMLA's schedule of two warpgroups (DeepSeek 2025)"

KERNELS = (
    Kernel(
        op="mla_attention",
        name="gluon.decode",
        target="kernelhub.backends.gluon.mla.adapter:Decode",
        summary="tiles of 64 rows, two warpgroups in turns, keys split by a schedule made on the device, parts merged",
        band=Band.TUNED,
        constraints=(
            *_QUERIES,
            SameValue("q_dtype", "kv_dtype", why="gluon.decode_fp8 takes float8"),
            *_WIDTHS,
            *_PAGES,
        ),
        features=frozenset({"causal", "sinks", "lse"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_SOURCE,
        standings=standings(60),
    ),
    Kernel(
        op="mla_attention",
        name="gluon.decode_listed",
        target="kernelhub.backends.gluon.mla.listed_adapter:Listed",
        summary="gluon.decode over lists of tokens, whose rows four warps gather",
        band=Band.TUNED,
        constraints=(
            *_QUERIES,
            SameValue("q_dtype", "kv_dtype", why="gluon.decode_listed_fp8 takes float8"),
            *_WIDTHS,
            *_LISTS,
        ),
        features=frozenset({"sparse", "ragged", "causal", "sinks", "lse"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_SOURCE,
        standings=standings(32, "gluon_more_h200.json"),
    ),
    Kernel(
        op="mla_attention",
        name="gluon.decode_listed_fp8",
        target="kernelhub.backends.gluon.mla.listed_adapter:ListedFloat8",
        summary="the same over latents in float8, which four warps load and make float16 of",
        band=Band.TUNED,
        constraints=(
            *_QUERIES,
            dtype_in("kv_dtype", FP8),
            *_WIDTHS,
            *_LISTS,
        ),
        features=frozenset({"sparse", "ragged", "causal", "sinks", "lse"}) | _SCALES,
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_SOURCE,
        standings=standings(24, "gluon_tests_h100.json"),
    ),
    Kernel(
        op="mla_attention",
        name="gluon.decode_fp8",
        target="kernelhub.backends.gluon.mla.adapter:DecodeFloat8",
        summary="gluon.decode over pages of float8, which four warps load and make float16 of",
        band=Band.TUNED,
        constraints=(
            *_QUERIES,
            dtype_in("kv_dtype", FP8),
            *_WIDTHS,
            *_PAGES,
        ),
        features=frozenset({"causal", "sinks", "lse"}) | _SCALES,
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_SOURCE,
        standings=standings(54, "gluon_mla_h200.json"),
    ),
)
