"""Records of the C++ kernels of attention."""

from __future__ import annotations

from kernelhub.backends.cpp.requirements import MACHINE, STANDINGS
from kernelhub.dispatch.constraint import Constraint, OnDevice, Rule, anything, dtype_in
from kernelhub.dispatch.kernel import Band, Kernel
from kernelhub.dispatch.standing import Standing, verified
from kernelhub.ops.attention.problem import FLOATS, FP8, ONE, QUANTISED, AttentionProblem

_SUMMARY = "keys and values are read once, in place, pieces of a sequence at the same time"
_MASKS = frozenset({"ragged", "causal", "window_left", "window_right", "softcap", "sinks", "lse"})
_KV_SCALES = frozenset({"kv_scale=value", "kv_scale=tensor", "kv_scale=head"})
_LATENT = frozenset({"ragged", "causal", "sparse", "sinks", "lse", "kv_scale=value", "kv_scale=tensor"})
_KV = (dtype_in("q_dtype", *FLOATS), dtype_in("kv_dtype", *FLOATS, *QUANTISED))


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
# The same by AVX-512 BF16, of a Zen 4: groups of 8 heads 0.79, of 12 0.96 and of 16 1.2; of an e4m3 cache, groups of
# 6 1.03, of 8 1.2. Of several queries the kernel itself takes few rows as cpp.split_kv does.
_FILLS_DOTS = _least_heads(12, 6)
_HEADS = ("num_q_heads", "num_kv_heads", "q_len", "head_dim_qk", "head_dim_vo")


def _ran(what: str, passed: int) -> tuple[Standing, ...]:
    """The standing of a kernel whose tests ran by themselves on a CPU that has its instructions."""
    run = f"CPU, 2 cores, 2026-11-27, torch 2.13.0+cpu, {what}: {passed} tests passed"
    return (verified("cpu", evidence=f"{run} (benchmarks/results/own_ops_cpu.json)"),)


def _by_products(
    name: str, instructions: str, arch: str, adapters: str, fills: Rule, passed: tuple[int, int, int]
) -> tuple[Kernel, ...]:
    """The records of a kernel that multiplies tiles of bfloat16 by certain instructions.

    Args:
        name: of the kernel.
        instructions: what multiplies, for messages.
        arch: of the CPUs that have them.
        adapters: what the names of its adapters begin with.
        fills: of how many heads decode fills tiles enough.
        passed: tests of `attention`, `paged_attention` and `mla_attention` that passed.
    """
    machine = (OnDevice("cpu", arch=(arch,)), *MACHINE[1:], dtype_in("q_dtype", "bfloat16"))
    latent = anything("num_heads", "head_dim", "value_dim", "page_size", "q_len")

    def made(op: str, target: str, constraints: tuple[Constraint, ...], features: frozenset[str], tests: int) -> Kernel:
        return Kernel(
            op=op,
            name=name,
            target=f"kernelhub.backends.cpp.attention.adapter:{target}",
            # Weights are rounded to bfloat16, as they are by other libraries.
            summary=f"products of bfloat16 by {instructions}, keys and values are read once for all rows of a task",
            band=Band.TUNED,
            constraints=(*machine, *constraints),
            features=features,
            deterministic=True,
            standings=_ran(f"{op} by {instructions}", tests),
        )

    dense, paged, of_latents = passed
    kv = dtype_in("kv_dtype", "bfloat16", *QUANTISED)
    heads = _MASKS | _KV_SCALES
    return (
        made("attention", adapters, (kv, fills, anything(*_HEADS)), heads, dense),
        made(
            "paged_attention",
            f"{adapters}Paged",
            (kv, fills, anything(*_HEADS, "page_size")),
            heads | {"kv_layout=HND"},
            paged,
        ),
        made(
            "mla_attention", f"{adapters}Latent", (dtype_in("kv_dtype", "bfloat16", FP8), latent), _LATENT, of_latents
        ),
    )


KERNELS = (
    *_by_products("cpp.avx512_bf16", "AVX-512 BF16", "avx512_bf16", "Dots", _FILLS_DOTS, (87, 82, 132)),
    *_by_products("cpp.amx", "AMX", "amx", "Amx", _FILLS_AMX, (87, 85, 127)),
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
