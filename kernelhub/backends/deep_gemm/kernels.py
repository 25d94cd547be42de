"""The deep_gemm backend and its records.

Its own code asserts little of N and K; limits are those of the engines that use it (N % 64, K % 128), stricter than
TMA's 16 bytes. Every kernel is compiled by nvcc at the first call of its shape class (N, K, groups, and a tile chosen
by M), which takes some seconds, into DG_JIT_CACHE_DIR (by default ~/.deep_gemm): call once before capturing.
"""

from __future__ import annotations

from kernelhub.backends.deep_gemm.requirements import BLACKWELL, BOTH, HOPPER, INSTALL, Lacks, machine_for
from kernelhub.dispatch.constraint import MultipleOf, OneOf, anything, dtype_in
from kernelhub.dispatch.kernel import Backend, Band, GraphLevel, Kernel, KnownBad, Watch
from kernelhub.dispatch.standing import published, verified
from kernelhub.ops.gemm.fp8.problem import BLOCK, E8M0, FLOAT
from kernelhub.ops.gemm.grouped.problem import FP8
from kernelhub.ops.indexer.problem import FP8 as INDEXER_FP8

_ON = "NVIDIA H200, 2026-11-23, torch 2.11.0+cu130"
_TOKENSPEED = "tokenspeed-deepgemm 2.5.0.post20260629: 104 tests passed"
_SGLANG = "2026-11-21, sgl-deep-gemm 0.1.4.post1: 92 tests passed"
_RESULTS = "(benchmarks/results/libraries_h200.json)"
_H200 = verified("hopper", evidence=f"{_ON}, {_TOKENSPEED}; {_SGLANG} {_RESULTS}")
_SM100 = published(
    "blackwell",
    evidence="DeepGEMM is for sm_90 and sm_100, there with scales in UE8M0: "
    "https://github.com/deepseek-ai/DeepGEMM#requirements",
)

ON_HOPPER = (_H200,)
ON_BLACKWELL = (_SM100,)
ON_BOTH = (_H200, _SM100)
BF16_PADDED = (verified("hopper", evidence=f"{_ON}, {_TOKENSPEED} {_RESULTS}"), _SM100)


_HERE = "kernelhub.backends.deep_gemm"
_SOURCE = "https://github.com/deepseek-ai/DeepGEMM"
_JIT = "compiled by nvcc at the first call of a shape class"

_MODULES = ("deep_gemm", "vllm.third_party.deep_gemm")  # a copy inside vLLM also has that name as a separate package

BACKEND = Backend(
    "deep_gemm",
    "DeepSeek's float8 products and indexer, compiled at first use",
    "deep_gemm",
    _SOURCE,
    watches=tuple(Watch(name, "kernelhub.backends.deep_gemm.watch:watch") for name in _MODULES),
)

_FP8_SIZES = (
    MultipleOf("n", 64, why="tiles of columns must be whole"),
    MultipleOf("k", 128, why="a scale covers 128 columns, and all blocks must be whole"),
)
_BF16_SIZES = (MultipleOf("n", 64, why="tiles of columns must be whole"), MultipleOf("k", 64, why="so must tiles of K"))
_BF16_OUT = dtype_in("out_dtype", "bfloat16", why="the kernel returns nothing else")
_ROUNDED = "the kernel reads exponents only; rounding other scales to powers of two would change the result"
_FP8_ROWS = (dtype_in("a_dtype", FP8), dtype_in("b_dtype", FP8), _BF16_OUT, *_FP8_SIZES, anything("num_groups", "rows"))
_FLOAT_SCALES = frozenset({"a_scale=group", "b_scale=block"})
_E8M0_SCALES = frozenset({"a_scale=group_e8m0", "b_scale=block_e8m0"})
_MASKED = OneOf("masked", (True,), why="another kernel serves rows sorted by group")
_INDEXER = (
    dtype_in("dtype", INDEXER_FP8),
    OneOf("num_heads", (32, 64)),
    OneOf("head_dim", (32, 64, 128)),
)

KERNELS = (
    Kernel(
        op="fp8_gemm",
        name="deep_gemm.fp8_blocks",
        target=f"{_HERE}.fp8_gemm:Fp8Blocks",
        summary=f"Hopper's product in blocks, float32 scales applied every 128 columns; {_JIT}",
        band=Band.SPECIALISED,
        constraints=(
            HOPPER,
            *machine_for("fp8_gemm"),
            OneOf("scaling", (BLOCK,)),
            _BF16_OUT,
            dtype_in("a_scale_dtype", FLOAT, E8M0),
            dtype_in("b_scale_dtype", FLOAT, E8M0),
            *_FP8_SIZES,
            anything("rows"),
        ),
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_SOURCE,
        standings=ON_HOPPER,
    ),
    Kernel(
        op="fp8_gemm",
        name="deep_gemm.fp8_blocks_ue8m0",
        target=f"{_HERE}.fp8_gemm:Fp8BlocksUe8m0",
        summary=f"Blackwell's product in blocks, scales as exponents in its tensor cores; {_JIT}",
        band=Band.SPECIALISED,
        constraints=(
            BLACKWELL,
            *machine_for("fp8_gemm"),
            OneOf("scaling", (BLOCK,)),
            _BF16_OUT,
            dtype_in("a_scale_dtype", E8M0, why=_ROUNDED),
            dtype_in("b_scale_dtype", E8M0, why=_ROUNDED),
            *_FP8_SIZES,
            anything("rows"),
        ),
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_SOURCE,
        standings=ON_BLACKWELL,
    ),
    Kernel(
        op="grouped_gemm",
        name="deep_gemm.fp8_contiguous",
        target=f"{_HERE}.grouped:Fp8Contiguous",
        summary=f"Hopper's product in blocks, groups padded to 128 rows on the device; {_JIT}",
        band=Band.SPECIALISED,
        constraints=(HOPPER, *machine_for("fp8_contiguous", "alignment"), *_FP8_ROWS),
        features=_FLOAT_SCALES | _E8M0_SCALES,
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_SOURCE,
        standings=ON_HOPPER,
    ),
    Kernel(
        op="grouped_gemm",
        name="deep_gemm.fp8_contiguous_ue8m0",
        target=f"{_HERE}.grouped:Fp8ContiguousUe8m0",
        summary=f"Blackwell's product in blocks, groups padded to 128 rows on the device; {_JIT}",
        band=Band.SPECIALISED,
        constraints=(BLACKWELL, *machine_for("fp8_contiguous", "alignment"), *_FP8_ROWS),
        features=_E8M0_SCALES,
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_SOURCE,
        standings=ON_BLACKWELL,
    ),
    Kernel(
        op="grouped_gemm",
        name="deep_gemm.fp8_masked",
        target=f"{_HERE}.grouped:Fp8Masked",
        summary=f"Hopper's product in blocks, tiles beyond a group's rows skipped; {_JIT}",
        band=Band.SPECIALISED,
        constraints=(HOPPER, *machine_for("fp8_masked"), *_FP8_ROWS, _MASKED),
        features=_FLOAT_SCALES | _E8M0_SCALES | {"masked"},
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_SOURCE,
        standings=ON_HOPPER,
    ),
    Kernel(
        op="grouped_gemm",
        name="deep_gemm.fp8_masked_ue8m0",
        target=f"{_HERE}.grouped:Fp8MaskedUe8m0",
        summary=f"Blackwell's product in blocks, tiles beyond a group's rows skipped; {_JIT}",
        band=Band.SPECIALISED,
        constraints=(BLACKWELL, *machine_for("fp8_masked"), *_FP8_ROWS, _MASKED),
        features=_E8M0_SCALES | {"masked"},
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_SOURCE,
        standings=ON_BLACKWELL,
    ),
    Kernel(
        op="grouped_gemm",
        name="deep_gemm.bf16_contiguous",
        target=f"{_HERE}.grouped:Bf16Contiguous",
        summary=f"bfloat16 products, groups padded to 128 rows on the device; {_JIT}",
        band=Band.SPECIALISED,
        constraints=(
            BOTH,
            *machine_for("bf16_contiguous", "alignment"),
            dtype_in("a_dtype", "bfloat16"),
            dtype_in("b_dtype", "bfloat16"),
            _BF16_OUT,
            *_BF16_SIZES,
            anything("num_groups", "rows"),
        ),
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_SOURCE,
        standings=BF16_PADDED,
    ),
    Kernel(
        op="grouped_gemm",
        name="deep_gemm.bf16_masked",
        target=f"{_HERE}.grouped:Bf16Masked",
        summary=f"bfloat16 products, tiles beyond a group's rows skipped; {_JIT}",
        band=Band.SPECIALISED,
        constraints=(
            BOTH,
            *machine_for("bf16_masked"),
            dtype_in("a_dtype", "bfloat16"),
            dtype_in("b_dtype", "bfloat16"),
            _BF16_OUT,
            *_BF16_SIZES,
            anything("num_groups", "rows"),
            _MASKED,
        ),
        features=frozenset({"masked"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_SOURCE,
        standings=ON_BOTH,
    ),
    Kernel(
        op="mqa_logits",
        name="deep_gemm.logits",
        target=f"{_HERE}.indexer:Logits",
        summary=f"the indexer's scores, heads summed in registers, copied into the result; {_JIT}",
        band=Band.SPECIALISED,
        constraints=(BOTH, *machine_for("mqa_logits"), *_INDEXER),
        features=frozenset({"k_scale"}),
        graph=GraphLevel.FULL,
        source=_SOURCE,
        standings=ON_BOTH,
    ),
    Kernel(
        op="paged_mqa_logits",
        name="deep_gemm.logits",
        target=f"{_HERE}.indexer:PagedLogits",
        summary=f"the indexer's scores over pages with their scales; separate scales are gathered first; {_JIT}",
        band=Band.SPECIALISED,
        constraints=(
            BOTH,
            *machine_for("paged_mqa_logits", "paged_metadata", "num_sms"),
            *_INDEXER,
            OneOf("page_size", (64,)),
        ),
        features=frozenset({"k_scale"}),
        graph=GraphLevel.FULL,
        source=_SOURCE,
        standings=ON_BOTH,
    ),
)

KNOWN_BAD = (
    # 2.4.2 added the name that distinguishes them; releases before it fixed the waits (#229, #285).
    KnownBad(
        "deep_gemm.logits",
        "*",
        (Lacks("fp8_fp4_mqa_logits"),),
        "before 2.4.2 its kernels lack waits, and may sum scores before they are written",
        "https://github.com/deepseek-ai/DeepGEMM/issues/392",
        INSTALL,
    ),
)
