"""Records of TensorRT-LLM's attention for Blackwell.

Their LSE is unsupported: its accuracy cannot be read from the binaries, and the library's own tests allow more than we
do.
"""

from __future__ import annotations

from kernelhub.backends.flashinfer import calls, standings
from kernelhub.backends.flashinfer.requirements import (
    CONSUMER_BLACKWELL,
    DATACENTRE_BLACKWELL,
    INSTALL,
    LAUNCHER,
    Cubins,
    Module,
    requirements,
)
from kernelhub.dispatch.constraint import (
    Between,
    OnDevice,
    OneOf,
    Package,
    Rule,
    SameValue,
    TorchBuilt,
    anything,
    dtype_in,
)
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel, KnownBad
from kernelhub.ops.attention.problem import ANY, FEW, MANY, ONE, AttentionProblem, PagedAttentionProblem
from kernelhub.ops.mla.attention.problem import MlaProblem

_HERE = "kernelhub.backends.flashinfer.trtllm"
_SOURCE = "TensorRT-LLM, as FlashInfer distributes it"
_HALVES = ("float16", "bfloat16")
_GROUP = ("num_q_heads", "num_kv_heads")
_ANY_LENGTH = OneOf("q_len", (ONE, FEW, MANY, ANY))
_PAGED = (
    dtype_in("q_dtype", *_HALVES),
    dtype_in("kv_dtype", *_HALVES, why="the library expects another form of its scales"),
    OneOf("head_dim_qk", (64, 128)),
    OneOf("head_dim_vo", (64, 128)),
    SameValue("head_dim_vo", "head_dim_qk", why="the kernel reads both with one set of strides"),
    OneOf("page_size", (16, 32, 64), why="binaries exist only for these"),
    anything(*_GROUP),
)
_FEATURES = frozenset({"causal", "window_left", "sinks", "kv_layout=HND"})

_LATENTS = (
    dtype_in("q_dtype", "bfloat16"),
    dtype_in("kv_dtype", "bfloat16", why="an fp8 cache requires fp8 queries"),
    OneOf("head_dim", (576,), why="the only supported width"),
    OneOf("value_dim", (512,), why="the only supported width"),
)
_DEVICE = (*_LATENTS, OneOf("ragged", (False,)))
_DEVICE_FEATURES = frozenset({"causal"})


def _window_without_mask(problem: PagedAttentionProblem) -> str | None:
    if problem.window_left and not problem.causal and (problem.q_len != ONE or problem.ragged):
        return "windows require a causal mask"
    return None


def _widths_of_deepseek(problem: AttentionProblem) -> str | None:
    widths = (problem.head_dim_qk, problem.head_dim_vo)
    return None if widths == (192, 128) else f"heads of {widths[0]} and {widths[1]}; binaries exist for 192 and 128"


def _mask_of_few(problem: MlaProblem) -> str | None:
    return None if problem.causal or problem.q_len == ONE else "several queries require a causal mask"


def _heads_of_trtllm(problem: MlaProblem) -> str | None:
    heads = problem.num_heads
    return None if heads <= 64 or heads == 128 else f"{heads} heads; supported: up to 64, and 128"


def _xqa_names(problem: MlaProblem) -> tuple[str, ...]:
    return (
        f"xqa_mla_input_bf16_kv_cache_bf16_page_size_{problem.page_size}_head_dim_576_head_group_ratio_128"
        "_use_sliding_window_False",
    )


KERNELS = (
    Kernel(
        op="paged_attention",
        name="flashinfer.trtllm_gen",
        target="kernelhub.backends.flashinfer.attention.xqa:TrtllmGen",
        summary="TensorRT-LLM's kernels for sm_100 and sm_103, distributed as binaries: one query",
        band=Band.TUNED,
        constraints=(
            *requirements(DATACENTRE_BLACKWELL, calls.TRTLLM_DECODE),
            *_PAGED,
            OneOf("q_len", (ONE,), why="it supports one query per sequence"),
            OneOf("ragged", (False,)),
            Cubins(),
            LAUNCHER,
        ),
        features=_FEATURES,
        graph=GraphLevel.UNIFORM_DECODE,
        source=_SOURCE,
        standings=standings.TRTLLM_GEN,
    ),
    Kernel(
        op="paged_attention",
        name="flashinfer.trtllm_context",
        target=f"{_HERE}.context:Context",
        summary="TensorRT-LLM's kernels for sm_100 and sm_103, distributed as binaries: any number of queries",
        band=Band.TUNED,
        constraints=(
            *requirements(DATACENTRE_BLACKWELL, calls.TRTLLM_CONTEXT),
            *_PAGED,
            _ANY_LENGTH,
            Rule(("window_left", "causal", "q_len", "ragged"), _window_without_mask, "value"),
            Cubins(),
            LAUNCHER,
        ),
        features=_FEATURES | {"ragged"},
        reads_lengths=True,
        source=_SOURCE,
        standings=standings.TRTLLM_CONTEXT,
    ),
    Kernel(
        op="attention",
        name="flashinfer.trtllm_ragged",
        target=f"{_HERE}.ragged:Ragged",
        summary="TensorRT-LLM's prefill for DeepSeek's heads on sm_100 and sm_103, distributed as binaries",
        band=Band.TUNED,
        constraints=(
            *requirements(DATACENTRE_BLACKWELL, calls.TRTLLM_RAGGED),
            dtype_in("q_dtype", "bfloat16"),
            SameValue("kv_dtype", "q_dtype"),
            Rule(("head_dim_qk", "head_dim_vo"), _widths_of_deepseek, "value"),
            _ANY_LENGTH,
            anything(*_GROUP),
            Cubins(),
            LAUNCHER,
        ),
        features=frozenset({"ragged", "causal"}),
        reads_lengths=True,
        source=_SOURCE,
        standings=standings.TRTLLM,
    ),
    Kernel(
        op="mla_attention",
        name="flashinfer.mla_trtllm",
        target=f"{_HERE}.latent:TrtllmLatent",
        summary="TensorRT-LLM's latent attention for sm_100 and sm_103, distributed as binaries: few queries",
        band=Band.TUNED,
        constraints=(
            *requirements(DATACENTRE_BLACKWELL, calls.TRTLLM_LATENT),
            *_DEVICE,
            OneOf("page_size", (32, 64), why="binaries exist only for these"),
            OneOf("q_len", (ONE, FEW), why="more queries are untested"),
            Rule(("causal", "q_len"), _mask_of_few, "value"),
            Rule(("num_heads",), _heads_of_trtllm, "value"),
            Cubins(),
            LAUNCHER,
        ),
        features=_DEVICE_FEATURES,
        graph=GraphLevel.UNIFORM_DECODE,
        source=_SOURCE,
        standings=standings.TRTLLM,
    ),
    Kernel(
        op="mla_attention",
        name="flashinfer.mla_trtllm_listed",
        target=f"{_HERE}.listed:Listed",
        summary="TensorRT-LLM's latent attention to listed tokens for sm_100 and sm_103, distributed as binaries",
        band=Band.TUNED,
        constraints=(
            *requirements(DATACENTRE_BLACKWELL, calls.TRTLLM_LATENT),
            *_LATENTS,
            OneOf("page_size", (32, 64), why="the library rejects others, although they do not affect lists"),
            _ANY_LENGTH,
            OneOf("num_heads", (64, 128), why="others are untested with lists"),
            OneOf("sparse", (True,), why="needs topk_indices"),
            Cubins(),
            LAUNCHER,
        ),
        features=frozenset({"ragged", "causal", "sparse"}),
        graph=GraphLevel.UNIFORM_DECODE,
        source=_SOURCE,
        standings=standings.TRTLLM,
    ),
    Kernel(
        op="mla_attention",
        name="flashinfer.mla_xqa",
        target=f"{_HERE}.latent:XqaLatent",
        summary="TensorRT-LLM's XQA of latents for sm_120 and sm_121: one query; "
        "compiled at first use, for a minute, unless built ahead",
        band=Band.TUNED,
        constraints=(
            *requirements(CONSUMER_BLACKWELL, calls.XQA_LATENT),
            # Before, the same call takes fp8 alone.
            Package("flashinfer", ">=0.6.12", distribution="flashinfer-python", install=INSTALL),
            TorchBuilt("12.9"),
            *_DEVICE,
            OneOf("page_size", (16, 32, 64, 128)),
            OneOf("q_len", (ONE,), why="it supports one query per sequence"),
            OneOf("num_heads", (128,), why="the size of a tile"),
            Module(("page_size",), _xqa_names),
        ),
        features=_DEVICE_FEATURES,
        graph=GraphLevel.UNIFORM_DECODE,
        source="TensorRT-LLM's XQA, as FlashInfer compiles it",
        standings=standings.XQA_LATENT,
    ),
)

# What the library takes and drops, sinks given to the planned wrappers, is no entry here: no record lists the feature.
KNOWN_BAD = (
    KnownBad(
        "flashinfer.trtllm_*",
        "paged_attention",
        (Between("page_size", 129, 1 << 16),),
        "it reads pages of more than 128 tokens as smaller ones",
        "https://github.com/flashinfer-ai/flashinfer/issues/4347",
    ),
    # TensorRT-LLM writes zeros there before it runs this kernel. Who does so too may force it.
    KnownBad(
        "flashinfer.trtllm_context",
        "paged_attention",
        (),
        "values in the unused end of a last page are multiplied by zero, so that NaN there reaches the result",
        "https://github.com/NVIDIA/TensorRT-LLM/pull/18925",
    ),
    KnownBad(
        "flashinfer.trtllm_ragged",
        "attention",
        (OnDevice("nvidia", only=((10, 3),)),),
        "the kernel for many queries in bfloat16 has a data race on sm_103",
        "https://github.com/flashinfer-ai/flashinfer/issues/5252",
    ),
    KnownBad(
        "flashinfer.mla_trtllm",
        "mla_attention",
        (OneOf("q_len", (FEW,)), Between("num_heads", 1, 63)),
        "several queries with few heads share a tile, which may misplace those of all sequences but the first",
        "https://github.com/flashinfer-ai/flashinfer/pull/4059",
    ),
)
