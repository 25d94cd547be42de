"""Records of FlashInfer's kernels of multi-head latent attention."""

from __future__ import annotations

from kernelhub.backends.flashinfer import calls, standings
from kernelhub.backends.flashinfer.requirements import HOPPER, ROUNDED_SUM, SM80_ON, Module, dtype_part, requirements
from kernelhub.dispatch.constraint import Between, OneOf, Package, Rule, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel, KnownBad
from kernelhub.ops.attention.problem import ANY, FEW, MANY, ONE
from kernelhub.ops.mla.attention.problem import MlaProblem
from kernelhub.ops.mla.concat.problem import ConcatProblem

_HERE = "kernelhub.backends.flashinfer.mla"
_HALVES = ("float16", "bfloat16")
_SOURCE = "FlashInfer (Ye et al. 2025)"
_COMPILED = "compiled at first use, for a minute, unless built ahead"


def _wrong_rotary_part(problem: MlaProblem) -> str | None:
    rope_dim = problem.head_dim - problem.value_dim
    return None if rope_dim == 64 else f"the rotary part is {rope_dim} wide; supported: 64"


def _module(suffix: str) -> Module:
    def names(problem: MlaProblem) -> tuple[str, ...]:
        start = (
            f"batch_mla_attention_{dtype_part(problem.q_dtype, problem.kv_dtype)}_head_dim_ckv_{problem.value_dim}"
            f"_head_dim_kpe_{problem.head_dim - problem.value_dim}_profiler_False"
        )
        return (f"{start}{suffix}", f"{start}_planabi2{suffix}")

    return Module(("q_dtype", "kv_dtype", "value_dim", "head_dim"), names)


def _fits_concat(problem: ConcatProblem) -> str | None:
    shape = (problem.num_heads, problem.nope_dim, problem.rope_dim)
    return None if shape == (128, 128, 64) else f"{shape} is not supported: it has 128 heads of 128 and 64"


_ATTENTION = (
    dtype_in("q_dtype", *_HALVES),
    dtype_in("kv_dtype", *_HALVES, why="an fp8 cache is not verified here"),
    OneOf("value_dim", (512,), why="other widths of the latent are not verified"),
    Rule(("head_dim", "value_dim"), _wrong_rotary_part, "value"),
    Between("page_size", 1, 1 << 16),
    OneOf("q_len", (ONE, FEW, MANY, ANY)),
    anything("num_heads"),
)
_FEATURES = frozenset({"ragged", "causal", "lse"})
_CALLS = (calls.MLA, calls.MLA_PLAN, calls.MLA_RUN)

KERNELS = (
    Kernel(
        op="mla_attention",
        name="flashinfer.mla_fa3",
        target=f"{_HERE}.paged:LatentHopper",
        summary=f"FlashAttention-3 over paged latents; {_COMPILED}",
        band=Band.TUNED,
        constraints=(*requirements(HOPPER, *_CALLS), *_ATTENTION, _module("_sm90")),
        features=_FEATURES,
        reads_lengths=True,
        source=_SOURCE,
        standings=standings.FA3,
    ),
    Kernel(
        op="mla_attention",
        name="flashinfer.mla_fa2",
        target=f"{_HERE}.paged:Latent",
        summary=f"FlashAttention-2 over paged latents; {_COMPILED}",
        band=Band.TUNED,
        constraints=(
            *requirements(SM80_ON, *_CALLS),
            *_ATTENTION,
            OneOf("lse", (False,), why=ROUNDED_SUM),
            _module(""),
        ),
        features=_FEATURES - {"lse"},
        reads_lengths=True,
        source=_SOURCE,
        standings=standings.FA2,
    ),
    Kernel(
        op="concat_mla_k",
        name="flashinfer.concat",
        target=f"{_HERE}.concat:Concat",
        summary="both parts in one launch, for the shape of DeepSeek's heads; compiled at first use unless built ahead",
        band=Band.TUNED,
        constraints=(
            *requirements(SM80_ON, calls.CONCAT),
            dtype_in("dtype", *_HALVES),
            Rule(("num_heads", "nope_dim", "rope_dim"), _fits_concat, "value"),
            Module((), lambda problem: ("concat_mla",)),
        ),
        graph=GraphLevel.FULL,
        source=_SOURCE,
        standings=standings.FA2,
    ),
)

KNOWN_BAD = (
    KnownBad(
        "flashinfer.mla_fa*",
        "mla_attention",
        (Package("flashinfer", "<0.6.11", distribution="flashinfer-python"),),
        "pages are addressed with 32 bits: past 2^32 elements of a cache it reads wrong pages, and results are zeros",
        "https://github.com/flashinfer-ai/flashinfer/issues/3130",
        'pip install "flashinfer-python>=0.6.11,<0.7.3"',
    ),
)
