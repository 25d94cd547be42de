"""Records of CUTLASS's attention for Blackwell, which FlashInfer compiles."""

from __future__ import annotations

from kernelhub.backends.flashinfer import calls, standings
from kernelhub.backends.flashinfer.requirements import DATACENTRE_BLACKWELL, Module, requirements
from kernelhub.dispatch.constraint import Between, OneOf, Rule, SameValue, TorchBuilt, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.attention.problem import ANY, FEW, MANY, ONE, AttentionProblem

_HERE = "kernelhub.backends.flashinfer.cutlass"
_SOURCE = "CUTLASS's example 77, as FlashInfer compiles it"
_HALVES = ("float16", "bfloat16")
_COMPILED = "compiled at first use, for minutes, unless built ahead"
_CUDA = TorchBuilt("12.8")  # the first that supports sm_100; the library rejects a torch of an older


def _widths_not_taken(problem: AttentionProblem) -> str | None:
    widths = (problem.head_dim_qk, problem.head_dim_vo)
    if widths in ((64, 64), (128, 128), (192, 128)):
        return None
    return f"heads of {widths[0]} and {widths[1]}; it supports 64, 128, and 192 with 128"


KERNELS = (
    Kernel(
        op="attention",
        name="flashinfer.cutlass_ragged",
        target=f"{_HERE}.ragged:Ragged",
        summary=f"CUTLASS's prefill for sm_100 and sm_103; {_COMPILED}",
        band=Band.TUNED,
        constraints=(
            *requirements(DATACENTRE_BLACKWELL, calls.CUTLASS_MODULE, calls.CUTLASS_RAGGED),
            _CUDA,
            dtype_in("q_dtype", *_HALVES),
            SameValue("kv_dtype", "q_dtype"),
            Rule(("head_dim_qk", "head_dim_vo"), _widths_not_taken, "value"),
            OneOf("q_len", (ONE, FEW, MANY, ANY)),
            anything("num_q_heads", "num_kv_heads"),
            Module((), lambda _: ("fmha_cutlass_sm100a",)),
        ),
        features=frozenset({"ragged", "causal", "lse"}),
        reads_lengths=True,
        source=_SOURCE,
        standings=standings.CUTLASS_ATTENTION,
    ),
    Kernel(
        op="mla_attention",
        name="flashinfer.mla_cutlass",
        target=f"{_HERE}.latent:Latent",
        summary="CUTLASS's latent attention for sm_100 and sm_103: one query, 128 heads; q is rounded once "
        f"more unless the scale is 192 ** -0.5 times a power of two; {_COMPILED}",
        band=Band.TUNED,
        constraints=(
            *requirements(DATACENTRE_BLACKWELL, calls.CUTLASS_LATENT_MODULE, calls.CUTLASS_LATENT),
            _CUDA,
            dtype_in("q_dtype", *_HALVES),
            dtype_in("kv_dtype", *_HALVES, why="it does not support fp8"),
            OneOf("head_dim", (576,), why="the only supported width"),
            OneOf("value_dim", (512,), why="the only supported width"),
            OneOf("num_heads", (128,), why="the size of a tile"),
            OneOf("q_len", (ONE,), why="it supports one query per sequence"),
            OneOf("ragged", (False,)),
            Between("page_size", 1, 1 << 16),
            Module((), lambda _: ("mla",)),
        ),
        features=frozenset({"causal"}),
        graph=GraphLevel.UNIFORM_DECODE,
        source=_SOURCE,
        standings=standings.CUTLASS_ATTENTION,
    ),
)
