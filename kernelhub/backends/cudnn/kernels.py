"""Records of cuDNN's kernels."""

from __future__ import annotations

from kernelhub.backends.cudnn.requirements import MACHINE
from kernelhub.dispatch.constraint import OneOf, Rule, SameValue, anything, dtype_in
from kernelhub.dispatch.kernel import Backend, Band, Kernel, KnownBad
from kernelhub.dispatch.standing import opt_in, verified
from kernelhub.ops.attention.problem import AttentionProblem

_RAN = (
    "NVIDIA H200, 2026-11-23, torch 2.11.0+cu130, nvidia-cudnn-frontend 1.32.0, cuDNN 9.19: 159 tests passed "
    "(benchmarks/results/libraries_h200.json)"
)

PACKED = (verified("hopper", evidence=_RAN),)
PAGED = (
    opt_in(
        "hopper",
        evidence=f"the caller must guarantee that the unused end of a page has no NaN. On such caches: {_RAN}",
    ),
)


BACKEND = Backend(
    name="cudnn",
    summary="cuDNN's attention by its Python frontend",
    package="cudnn",
    homepage="https://github.com/NVIDIA/cudnn-frontend",
)

WIDTHS = ((64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256))


def _width_not_seen(problem: AttentionProblem) -> str | None:
    width = (problem.head_dim_qk, problem.head_dim_vo)
    return f"heads are {width[0]} and {width[1]} wide; supported: {_TAKEN}" if width not in WIDTHS else None


_TAKEN = ", ".join(f"{qk}/{vo}" for qk, vo in WIDTHS)

_HEADS = (
    *MACHINE,
    dtype_in("q_dtype", "bfloat16", "float16"),
    SameValue("q_dtype", "kv_dtype", why="its fp8 attention requires fp8 queries"),
    Rule(("head_dim_qk", "head_dim_vo"), _width_not_seen, code="value"),
    anything("num_q_heads", "num_kv_heads", "q_len"),
)
_FEATURES = frozenset({"ragged", "causal", "window_left", "window_right", "lse"})
_SOURCE = "cuDNN, scaled dot product attention"

KERNELS = (
    Kernel(
        op="attention",
        name="cudnn.sdpa",
        target="kernelhub.backends.cudnn.sdpa:Sdpa",
        summary="cuDNN's flash attention over packed sequences, one graph per class of sizes",
        band=Band.SPECIALISED,
        constraints=_HEADS,
        features=_FEATURES,
        compiles_sizes=True,
        source=_SOURCE,
        standings=PACKED,
    ),
    Kernel(
        op="paged_attention",
        name="cudnn.sdpa_paged",
        target="kernelhub.backends.cudnn.paged:SdpaPaged",
        summary="cuDNN's flash attention over pages, one graph per class of sizes; only for caches without NaN",
        band=Band.SPECIALISED,
        constraints=(*_HEADS, OneOf("page_size", (16, 32, 64, 128, 256), why="cuDNN supports powers of two")),
        features=_FEATURES | {"kv_layout=HND"},
        source=_SOURCE,
        standings=PAGED,
    ),
)

# Rows behind a length take part in the second product with weights of zero: "so must be finite", cuDNN's documentation
# says of packed tensors. Seen over pages with cuDNN 9.19 on an H200. Who keeps caches free of NaN may force it.
KNOWN_BAD = (
    KnownBad(
        "cudnn.sdpa_paged",
        "paged_attention",
        (),
        "values in the unused end of a last page are multiplied by zero, so that NaN there reaches the result",
        "https://github.com/NVIDIA/cudnn-frontend/pull/740",
    ),
)
