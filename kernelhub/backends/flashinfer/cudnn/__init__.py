"""Records of cuDNN's attention as FlashInfer calls it.

They are the kernels that the backend `cudnn` runs, by graphs that the library makes and keeps.
"""

from __future__ import annotations

from kernelhub.backends.flashinfer import calls, standings
from kernelhub.backends.flashinfer.requirements import HOPPER, requirements
from kernelhub.dispatch.constraint import OneOf, Package, Rule, SameValue, anything, dtype_in
from kernelhub.dispatch.kernel import Band, Kernel, KnownBad
from kernelhub.ops.attention.problem import ANY, FEW, MANY, ONE, AttentionProblem

_HERE = "kernelhub.backends.flashinfer.cudnn"
_SOURCE = "cuDNN, scaled dot product attention"

# Without the frontend the same functions run binaries that are downloaded, for Blackwell, and need lengths on the host.
# They are not kernels of ours: so the frontend is required, in the one version that was verified, and adapters
# refuse to run where the library could not import it.
_FRONTEND = Package(
    "cudnn", ">=1.32,<1.33", distribution="nvidia-cudnn-frontend", install='pip install "kernelhub[cudnn]"'
)
_HALVES = ("float16", "bfloat16")
_DTYPES = (
    dtype_in("q_dtype", *_HALVES),
    SameValue("kv_dtype", "q_dtype", why="an fp8 KV requires fp8 queries"),
)
_GROUP = anything("num_q_heads", "num_kv_heads")
_ANY_LENGTH = OneOf("q_len", (ONE, FEW, MANY, ANY))
_PAGES = (
    OneOf("head_dim_qk", (128,), why="the values that the library documents"),
    OneOf("head_dim_vo", (128,), why="the values that the library documents"),
    OneOf("page_size", (16, 32, 64, 128, 256), why="cuDNN supports powers of two"),
)


def _widths_not_named(problem: AttentionProblem) -> str | None:
    widths = (problem.head_dim_qk, problem.head_dim_vo)
    if widths in ((128, 128), (192, 128)):
        return None
    return f"heads of {widths[0]} and {widths[1]}; the library documents 128, and 192 with 128"


KERNELS = (
    Kernel(
        op="paged_attention",
        name="flashinfer.cudnn_decode",
        target=f"{_HERE}.paged:Decode",
        summary="cuDNN's attention over pages for one query, by FlashInfer's graphs",
        band=Band.TUNED,
        constraints=(
            *requirements(HOPPER, calls.CUDNN_DECODE),
            _FRONTEND,
            *_DTYPES,
            *_PAGES,
            _GROUP,
            OneOf("q_len", (ONE,), why="it supports one query per sequence"),
            OneOf("ragged", (False,)),
        ),
        features=frozenset({"causal", "kv_layout=HND"}),
        source=_SOURCE,
        standings=standings.CUDNN,
    ),
    Kernel(
        op="paged_attention",
        name="flashinfer.cudnn_prefill",
        target=f"{_HERE}.paged:Prefill",
        summary="cuDNN's attention over pages for any number of queries, by FlashInfer's graphs; for caches "
        "without NaN",
        band=Band.TUNED,
        constraints=(
            *requirements(HOPPER, calls.CUDNN_PREFILL),
            _FRONTEND,
            *_DTYPES,
            *_PAGES,
            _GROUP,
            _ANY_LENGTH,
        ),
        features=frozenset({"ragged", "causal", "lse", "kv_layout=HND"}),
        source=_SOURCE,
        standings=standings.CUDNN_PROMISE,
    ),
    Kernel(
        op="attention",
        name="flashinfer.cudnn_ragged",
        target=f"{_HERE}.ragged:Ragged",
        summary="cuDNN's attention of packed sequences, by FlashInfer's graphs",
        band=Band.TUNED,
        constraints=(
            *requirements(HOPPER, calls.CUDNN_RAGGED),
            _FRONTEND,
            *_DTYPES,
            Rule(("head_dim_qk", "head_dim_vo"), _widths_not_named, "value"),
            _GROUP,
            _ANY_LENGTH,
        ),
        features=frozenset({"ragged", "causal", "lse"}),
        compiles_sizes=True,
        source=_SOURCE,
        standings=standings.CUDNN,
    ),
)

_POISONED = "values in the unused end of a last page are multiplied by zero, so that NaN there reaches the result"
_MULTIPLIED = "https://github.com/NVIDIA/cudnn-frontend/pull/740"

KNOWN_BAD = (
    # That for one query is not: on an H200 with cuDNN 9.19 it bore NaN in all ends of pages.
    KnownBad("flashinfer.cudnn_prefill", "paged_attention", (), _POISONED, _MULTIPLIED),
    # Up to 0.7.0 strides are in no key, the number of pages not in that of prefill, and no dtype in that of decode,
    # which takes queries for bfloat16; up to 0.6.12 the factor of scores is in neither. All callers share graphs.
    KnownBad(
        "flashinfer.cudnn_*",
        "*",
        (Package("flashinfer", "<0.7.1", distribution="flashinfer-python"),),
        "a call may run a graph that was made for other strides, dtypes, numbers of pages or factors",
        "https://github.com/flashinfer-ai/flashinfer/pull/4270",
        'pip install "flashinfer-python>=0.7.1,<0.7.3"',
    ),
)
