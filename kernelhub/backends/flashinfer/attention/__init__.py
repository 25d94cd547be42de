"""Records of FlashInfer's kernels of attention.

XQA and a separate wrapper apply sinks: the others accept the argument and ignore it. None of the planned
ones can be captured in a CUDA graph here: their tables belong to one step.
"""

from __future__ import annotations

from kernelhub.backends.flashinfer import calls, standings
from kernelhub.backends.flashinfer.requirements import (
    HOPPER,
    ROUNDED_SUM,
    SM80_ON,
    Module,
    dtype_part,
    requirements,
)
from kernelhub.dispatch.constraint import Between, OnDevice, OneOf, Package, Rule, SameValue, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel, KnownBad
from kernelhub.ops.attention.problem import ANY, FEW, FP8, MANY, ONE, AttentionProblem, PagedAttentionProblem

_HERE = "kernelhub.backends.flashinfer.attention"
_SOURCE = "FlashInfer (Ye et al. 2025)"
_HALVES = ("float16", "bfloat16")
_COMPILED = "compiled at first use, for minutes, unless built ahead"

_PAGES = Between("page_size", 1, 1 << 16)
_ANY_LENGTH = OneOf("q_len", (ONE, FEW, MANY, ANY))
_ONE_QUERY = OneOf("q_len", (ONE,), why="it supports one query per sequence")
_NO_LSE = OneOf("lse", (False,), why=ROUNDED_SUM)
_SAME_WIDTH = SameValue("head_dim_vo", "head_dim_qk", why="the kernel reads both with one set of strides")
_SQUARE = (OneOf("head_dim_qk", (64, 128, 256)), OneOf("head_dim_vo", (64, 128, 256)), _SAME_WIDTH)
_HALF_OR_FP8 = (
    dtype_in("q_dtype", *_HALVES),
    dtype_in("kv_dtype", *_HALVES, FP8),
)
_HALF = (dtype_in("q_dtype", *_HALVES), dtype_in("kv_dtype", *_HALVES, why="an fp8 KV requires fp8 queries"))
_FACETS = ("q_dtype", "kv_dtype", "head_dim_qk", "head_dim_vo", "window_left", "softcap")


def _prefill_module(suffix: str) -> Module:
    def names(problem: AttentionProblem) -> tuple[str, ...]:
        return (f"batch_prefill_with_kv_cache_{_shape_part(problem)}_f16qk_False{suffix}",)

    return Module(_FACETS, names)


def _decode_names(problem: AttentionProblem) -> tuple[str, ...]:
    return (f"batch_decode_with_kv_cache_{_shape_part(problem)}",)


def _shape_part(problem: AttentionProblem) -> str:
    return (
        f"{dtype_part(problem.q_dtype, problem.kv_dtype)}_head_dim_qk_{problem.head_dim_qk}"
        f"_head_dim_vo_{problem.head_dim_vo}_posenc_0_use_swa_{problem.window_left}"
        f"_use_logits_cap_{problem.softcap}"
    )


def _xqa_names(problem: PagedAttentionProblem) -> tuple[str, ...]:
    dtype = {"float16": "f16", "bfloat16": "bf16"}.get(problem.q_dtype, problem.q_dtype)
    start = (
        f"xqa_input_{dtype}_kv_cache_{dtype}_output_{dtype}_page_size_{problem.page_size}"
        f"_head_dim_{problem.head_dim_qk}_head_group_ratio_{problem.num_q_heads // problem.num_kv_heads}"
        f"_use_sliding_window_{problem.window_left}_use_spec_dec_False"
    )
    return (start, f"{start}_spec_q_seq_len_1")


def _sinks_module(backend: str) -> Module:
    def names(problem: PagedAttentionProblem) -> tuple[str, ...]:
        dtype = {"float16": "f16", "bfloat16": "bf16"}.get(problem.q_dtype, problem.q_dtype)
        return (f"batch_prefill_attention_sink_{dtype}_swa_{problem.window_left}_{backend}",)

    return Module(("q_dtype", "window_left"), names)


_FA2 = _prefill_module("")
_FA3 = _prefill_module("_sm90")
_DECODE = Module(_FACETS, _decode_names)
_XQA = Module(("q_dtype", "page_size", "head_dim_qk", "num_q_heads", "num_kv_heads", "window_left"), _xqa_names)


def _widths_not_known(problem: AttentionProblem) -> str | None:
    widths = (problem.head_dim_qk, problem.head_dim_vo)
    if widths in ((64, 64), (128, 128), (192, 128), (256, 256)):
        return None
    return f"heads of {widths[0]} and {widths[1]} are untested; tested: 64, 128, 256, and 192 with 128"


def _group_of_xqa(problem: PagedAttentionProblem) -> str | None:
    group = problem.num_q_heads // problem.num_kv_heads
    return f"{group} query heads share a KV head; up to 32 fit a tile" if group > 32 else None


def _rough_cap(problem: AttentionProblem) -> str | None:
    """`tanh.approx` is exact to 2 ** -11 of a score: not enough for tolerances of 2 ** -10 or 2 ** -12 of one."""
    if problem.softcap and (problem.lse or problem.q_dtype == "float16"):
        what = "an LSE" if problem.lse else "float16"
        return f"softcap is computed to 2 ** -11 of a score, which is too inexact for {what}"
    return None


_CAP = Rule(("softcap", "lse", "q_dtype"), _rough_cap, "value")
_GROUP = ("num_q_heads", "num_kv_heads")
_FEATURES = frozenset({"ragged", "causal", "window_left", "softcap", "lse"})
_PAGED_FEATURES = _FEATURES | {"kv_layout=HND"}
_FP8_FEATURES = _PAGED_FEATURES | {"kv_scale=value"}
_DECODE_CALLS = (calls.DECODE, calls.DECODE_PLAN, calls.DECODE_RUN)
_PREFILL_CALLS = (calls.PREFILL, calls.PREFILL_PLAN, calls.PREFILL_RUN)
_RAGGED_CALLS = (calls.RAGGED, calls.RAGGED_PLAN, calls.RAGGED_RUN)

# The library names the module by dtype, window and backend alone: of two widths in one process, or built ahead, the
# second would be answered by the kernel of the first. So there is one, that of the models with sinks.
_ONE_WIDTH = "the library's module name does not include the width, so one width is used for all"
_SINKS = (
    *_HALF,
    OneOf("head_dim_qk", (64,), why=_ONE_WIDTH),
    OneOf("head_dim_vo", (64,), why=_ONE_WIDTH),
    _SAME_WIDTH,
    _PAGES,
    _ANY_LENGTH,
    anything(*_GROUP),
    OneOf("sinks", (True,), why="without sinks another kernel does the same"),
)
_SINKS_FEATURES = frozenset({"ragged", "causal", "window_left", "sinks", "kv_layout=HND"})


def _few_heads_share(problem: PagedAttentionProblem) -> str | None:
    group = problem.num_q_heads // problem.num_kv_heads
    return None if group in (1, 2, 3) else f"{group} query heads share a KV head; from 4 on tensor cores are faster"


def _many_heads_share(problem: PagedAttentionProblem) -> str | None:
    group = problem.num_q_heads // problem.num_kv_heads
    return f"{group} query heads share a KV head; below 4, CUDA cores are faster" if group < 4 else None


KERNELS = (
    Kernel(
        op="paged_attention",
        name="flashinfer.fa2_decode",
        target=f"{_HERE}.paged:Decode",
        summary=f"one query on CUDA cores, for fewer than 4 heads to a KV head; {_COMPILED}",
        band=Band.TUNED,
        constraints=(
            *requirements(SM80_ON, *_DECODE_CALLS),
            *_HALF_OR_FP8,
            *_SQUARE,
            _PAGES,
            _ONE_QUERY,
            Rule(_GROUP, _few_heads_share, "value"),
            OneOf("ragged", (False,)),
            _CAP,
            _DECODE,
        ),
        features=_FP8_FEATURES - {"ragged"},
        reads_lengths=True,
        source=_SOURCE,
        standings=standings.FA2,
    ),
    Kernel(
        op="paged_attention",
        name="flashinfer.fa2_decode_tc",
        target=f"{_HERE}.paged:DecodeTensorCores",
        summary=f"one query on tensor cores, for 4 heads and more to a KV head; {_COMPILED}",
        band=Band.TUNED,
        constraints=(
            *requirements(SM80_ON, *_DECODE_CALLS),
            *_HALF_OR_FP8,
            *_SQUARE,
            _PAGES,
            _ONE_QUERY,
            Rule(_GROUP, _many_heads_share, "value"),
            OneOf("ragged", (False,)),
            _CAP,
            _NO_LSE,
            _FA2,
        ),
        features=_FP8_FEATURES - {"ragged", "lse"},
        reads_lengths=True,
        source=_SOURCE,
        standings=standings.FA2,
    ),
    Kernel(
        op="paged_attention",
        name="flashinfer.fa2_prefill",
        target=f"{_HERE}.paged:Prefill",
        summary=f"FlashAttention-2 for any number of queries, keys split as the device needs; {_COMPILED}",
        band=Band.TUNED,
        constraints=(
            *requirements(SM80_ON, *_PREFILL_CALLS),
            *_HALF_OR_FP8,
            *_SQUARE,
            _PAGES,
            _ANY_LENGTH,
            anything(*_GROUP),
            _CAP,
            _NO_LSE,
            _FA2,
        ),
        features=_FP8_FEATURES - {"lse"},
        reads_lengths=True,
        source=_SOURCE,
        standings=standings.FA2,
    ),
    Kernel(
        op="paged_attention",
        name="flashinfer.fa3_prefill",
        target=f"{_HERE}.paged:PrefillHopper",
        summary=f"FlashAttention-3 for many queries; {_COMPILED}",
        band=Band.TUNED,
        constraints=(
            *requirements(HOPPER, *_PREFILL_CALLS),
            *_HALF,
            *_SQUARE,
            _PAGES,
            _ANY_LENGTH,
            anything(*_GROUP),
            _CAP,
            _FA3,
        ),
        features=_PAGED_FEATURES,
        reads_lengths=True,
        source=_SOURCE,
        standings=standings.FA3,
    ),
    Kernel(
        op="paged_attention",
        name="flashinfer.xqa",
        target=f"{_HERE}.xqa:Xqa",
        summary="TensorRT-LLM's XQA: one query, lengths read on the device, sinks applied; "
        "compiled at first use, for half a minute, unless built ahead",
        band=Band.TUNED,
        constraints=(
            *requirements(OnDevice("nvidia", only=((9, 0), (10, 0), (10, 3), (12, 0), (12, 1))), calls.XQA),
            dtype_in("q_dtype", *_HALVES),
            dtype_in("kv_dtype", *_HALVES, why="with an fp8 KV it multiplies in fp8"),
            *_SQUARE,
            OneOf("page_size", (16, 32, 64, 128)),
            _ONE_QUERY,
            OneOf("ragged", (False,)),
            Rule(_GROUP, _group_of_xqa, "value"),
            _XQA,
        ),
        features=frozenset({"causal", "window_left", "sinks", "kv_layout=HND"}),
        graph=GraphLevel.UNIFORM_DECODE,
        source="TensorRT-LLM's XQA, as FlashInfer compiles it",
        standings=standings.XQA,
    ),
    Kernel(
        op="paged_attention",
        name="flashinfer.fa3_sinks",
        target=f"{_HERE}.sinks:SinksHopper",
        summary=f"FlashAttention-3 with sinks, by the only wrapper that applies them; {_COMPILED}",
        band=Band.TUNED,
        constraints=(*requirements(HOPPER, calls.SINKS, *_PREFILL_CALLS[1:]), *_SINKS, _sinks_module("fa3")),
        features=_SINKS_FEATURES,
        reads_lengths=True,
        source=_SOURCE,
        standings=standings.FA3,
    ),
    Kernel(
        op="paged_attention",
        name="flashinfer.fa2_sinks",
        target=f"{_HERE}.sinks:Sinks",
        summary=f"FlashAttention-2 with sinks, by the only wrapper that applies them; {_COMPILED}",
        band=Band.TUNED,
        constraints=(*requirements(SM80_ON, calls.SINKS, *_PREFILL_CALLS[1:]), *_SINKS, _sinks_module("fa2")),
        features=_SINKS_FEATURES,
        reads_lengths=True,
        source=_SOURCE,
        standings=standings.FA2,
    ),
    Kernel(
        op="attention",
        name="flashinfer.fa2_ragged",
        target=f"{_HERE}.ragged:Ragged",
        summary=f"FlashAttention-2 of packed sequences; {_COMPILED}",
        band=Band.TUNED,
        constraints=(
            *requirements(SM80_ON, *_RAGGED_CALLS),
            *_HALF,
            Rule(("head_dim_qk", "head_dim_vo"), _widths_not_known, "value"),
            _ANY_LENGTH,
            anything(*_GROUP),
            _CAP,
            _NO_LSE,
            _FA2,
        ),
        features=_FEATURES - {"lse"},
        reads_lengths=True,
        source=_SOURCE,
        standings=standings.FA2,
    ),
    Kernel(
        op="attention",
        name="flashinfer.fa3_ragged",
        target=f"{_HERE}.ragged:RaggedHopper",
        summary=f"FlashAttention-3 of packed sequences; {_COMPILED}",
        band=Band.TUNED,
        constraints=(
            *requirements(HOPPER, *_RAGGED_CALLS),
            *_HALF,
            Rule(("head_dim_qk", "head_dim_vo"), _widths_not_known, "value"),
            _ANY_LENGTH,
            anything(*_GROUP),
            _CAP,
            _FA3,
        ),
        features=_FEATURES,
        reads_lengths=True,
        source=_SOURCE,
        standings=standings.FA3,
    ),
)

_NEEDS_0_6_17 = 'pip install "flashinfer-python>=0.6.17,<0.7.3"'
_OPEN_ENDED = (OneOf("window_left", (True,)), OneOf("causal", (False,)), OneOf("q_len", (FEW, MANY, ANY)))
_SPLIT = "with a window and no causal mask, results are wrong where keys are split among blocks"
_ISSUES = "https://github.com/flashinfer-ai/flashinfer"

# What the library takes and drops, sinks given to the planned wrappers, is no entry here: no record lists the feature.
KNOWN_BAD = (
    # As in the scheduler of 0.6.0 to 0.7.2: window_left + a tile of queries, for every mask.
    KnownBad("flashinfer.fa2_prefill", "paged_attention", _OPEN_ENDED, _SPLIT, f"{_ISSUES}/issues/4972"),
    KnownBad("flashinfer.fa2_sinks", "paged_attention", _OPEN_ENDED, _SPLIT, f"{_ISSUES}/issues/4972"),
    KnownBad("flashinfer.fa2_ragged", "attention", _OPEN_ENDED, _SPLIT, f"{_ISSUES}/issues/4972"),
    # Seen on sm_121, and with windows; in the source of 0.6.16 every block writes, on every device.
    KnownBad(
        "flashinfer.xqa",
        "paged_attention",
        (Package("flashinfer", "<0.6.17", distribution="flashinfer-python"),),
        "a block that summed part of the keys may write its part over the sum of all",
        f"{_ISSUES}/pull/4161",
        _NEEDS_0_6_17,
    ),
    KnownBad(
        "flashinfer.xqa",
        "paged_attention",
        (OnDevice("nvidia", only=((12, 1),)),),
        "on sm_121 results of long contexts are wrong, seen from 120,000 tokens on with 0.6.17",
        "https://github.com/sgl-project/sglang/pull/36806",
    ),
)
