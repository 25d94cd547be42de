"""Records of the C++ kernels of attention."""

from __future__ import annotations

from kernelhub.backends.cpp.requirements import MACHINE, STANDINGS
from kernelhub.dispatch.constraint import OnDevice, Rule, anything, dtype_in
from kernelhub.dispatch.kernel import Band, Kernel
from kernelhub.dispatch.standing import Standing, verified
from kernelhub.ops.attention.problem import FLOATS, FP8, ONE, QUANTISED, AttentionProblem

_SUMMARY = "keys and values are read once, in place, pieces of a sequence at the same time"
_MASKS = frozenset({"ragged", "causal", "window_left", "window_right", "softcap", "sinks", "lse"})
_KV_SCALES = frozenset({"kv_scale=value", "kv_scale=tensor", "kv_scale=head"})
_LATENT = frozenset({"ragged", "causal", "sparse", "sinks", "lse", "kv_scale=value", "kv_scale=tensor"})
_KV = (dtype_in("q_dtype", *FLOATS), dtype_in("kv_dtype", *FLOATS, *QUANTISED))
# Weights are rounded to bfloat16, as they are by other libraries.
_AMX = "products of bfloat16 by AMX, keys and values are read once for all rows of a task"
_ON_AMX = (OnDevice("cpu", arch=("amx",)), *MACHINE[1:], dtype_in("q_dtype", "bfloat16"))
_DOTS = "products of bfloat16 by AVX-512 BF16, keys and values are read once for all rows of a task"
_ON_DOTS = (OnDevice("cpu", arch=("avx512_bf16",)), *MACHINE[1:], dtype_in("q_dtype", "bfloat16"))
_KV_ON_TILES = dtype_in("kv_dtype", "bfloat16", *QUANTISED)


def _least_heads(of_bfloat16: int, of_fp8: int) -> Rule:
    """Of the 16 rows of a tile, decode fills as many as a KV head has heads: at least so many, by the dtype of KV."""

    def fills_tiles(problem: AttentionProblem) -> str | None:
        least = of_bfloat16 if problem.kv_dtype == "bfloat16" else of_fp8
        if problem.q_len != ONE or problem.num_q_heads >= least * problem.num_kv_heads:
            return None
        return f"decode of fewer than {least} heads to a KV head leaves most of a tile empty: cpp.split_kv is faster"

    return Rule(("q_len", "num_q_heads", "num_kv_heads", "kv_dtype"), fills_tiles, code="num_q_heads")


# 8 x 1024 keys, one thread of a Xeon, the time of cpp.split_kv over that by AMX: groups of 4 heads 0.76, of 6 0.95, of
# 8 1.13 and of 16 1.9; of an fp8 cache, groups of 2 0.94, of 4 1.13 and of 8 1.83.
_FILLS_AMX = _least_heads(8, 4)
# The same by AVX-512 BF16, of a Zen 4: groups of 4 heads 0.72, of 6 0.92, of 8 1.1 and of 16 1.8; of an fp8 cache,
# groups of 4 0.93, of 6 1.5 and of 8 1.7. Of several queries the kernel itself takes few rows as cpp.split_kv does.
_FILLS_DOTS = _least_heads(8, 6)
_HEADS = ("num_q_heads", "num_kv_heads", "q_len", "head_dim_qk", "head_dim_vo")


def _ran(what: str, passed: int) -> tuple[Standing, ...]:
    """The standing of a kernel whose tests ran by themselves on a CPU that has its instructions."""
    run = f"CPU, 2 cores, 2026-11-27, torch 2.13.0+cpu, {what}: {passed} tests passed"
    return (verified("cpu", evidence=f"{run} (benchmarks/results/own_ops_cpu.json)"),)


KERNELS = (
    Kernel(
        op="attention",
        name="cpp.avx512_bf16",
        target="kernelhub.backends.cpp.attention.adapter:Dots",
        summary=_DOTS,
        band=Band.TUNED,
        constraints=(*_ON_DOTS, _KV_ON_TILES, _FILLS_DOTS, anything(*_HEADS)),
        features=_MASKS | _KV_SCALES,
        deterministic=True,
        standings=_ran("attention by AVX-512 BF16", 87),
    ),
    Kernel(
        op="paged_attention",
        name="cpp.avx512_bf16",
        target="kernelhub.backends.cpp.attention.adapter:DotsPaged",
        summary=_DOTS,
        band=Band.TUNED,
        constraints=(*_ON_DOTS, _KV_ON_TILES, _FILLS_DOTS, anything(*_HEADS, "page_size")),
        features=_MASKS | _KV_SCALES | {"kv_layout=HND"},
        deterministic=True,
        standings=_ran("paged_attention by AVX-512 BF16", 82),
    ),
    Kernel(
        op="mla_attention",
        name="cpp.avx512_bf16",
        target="kernelhub.backends.cpp.attention.adapter:DotsLatent",
        summary=_DOTS,
        band=Band.TUNED,
        constraints=(
            *_ON_DOTS,
            dtype_in("kv_dtype", "bfloat16", FP8),
            anything("num_heads", "head_dim", "value_dim", "page_size", "q_len"),
        ),
        features=_LATENT,
        deterministic=True,
        standings=_ran("mla_attention by AVX-512 BF16", 132),
    ),
    Kernel(
        op="attention",
        name="cpp.amx",
        target="kernelhub.backends.cpp.attention.adapter:Amx",
        summary=_AMX,
        band=Band.TUNED,
        constraints=(*_ON_AMX, _KV_ON_TILES, _FILLS_AMX, anything(*_HEADS)),
        features=_MASKS | _KV_SCALES,
        deterministic=True,
        standings=_ran("attention by AMX", 87),
    ),
    Kernel(
        op="paged_attention",
        name="cpp.amx",
        target="kernelhub.backends.cpp.attention.adapter:AmxPaged",
        summary=_AMX,
        band=Band.TUNED,
        constraints=(*_ON_AMX, _KV_ON_TILES, _FILLS_AMX, anything(*_HEADS, "page_size")),
        features=_MASKS | _KV_SCALES | {"kv_layout=HND"},
        deterministic=True,
        standings=_ran("paged_attention by AMX", 85),
    ),
    Kernel(
        op="mla_attention",
        name="cpp.amx",
        target="kernelhub.backends.cpp.attention.adapter:AmxLatent",
        summary=_AMX,
        band=Band.TUNED,
        constraints=(
            *_ON_AMX,
            dtype_in("kv_dtype", "bfloat16", FP8),
            anything("num_heads", "head_dim", "value_dim", "page_size", "q_len"),
        ),
        features=_LATENT,
        deterministic=True,
        standings=_ran("mla_attention by AMX", 127),
    ),
    Kernel(
        op="attention",
        name="cpp.split_kv",
        target="kernelhub.backends.cpp.attention.adapter:SplitKV",
        summary=_SUMMARY,
        band=Band.TUNED,
        constraints=(*MACHINE, *_KV, anything(*_HEADS)),
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
        constraints=(*MACHINE, *_KV, anything(*_HEADS, "page_size")),
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
        features=_LATENT,
        deterministic=True,
        standings=STANDINGS,
    ),
)
