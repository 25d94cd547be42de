"""Records of the CUDA kernels of matrix products."""

from __future__ import annotations

from kernelhub.backends.cuda.requirements import MACHINE
from kernelhub.dispatch.constraint import MultipleOf, OnDevice, OneOf, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.dispatch.standing import verified
from kernelhub.ops.gemm.fp8.problem import BLOCK, FLOAT

_FP4_RAN = (
    "NVIDIA H200, 2026-11-28, torch 2.11.0+cu130, float4 products by CUDA: 100 tests passed, none failed "
    "(benchmarks/results/cuda_fp4_h200.json)"
)
_FP8_RAN = (
    "NVIDIA H200, 2026-11-28, torch 2.11.0+cu130, float8 products by CUDA: 52 tests passed, none failed "
    "(benchmarks/results/cuda_gemm_h200.json); float8 products with turned scales by CUDA: 47 tests passed, none "
    "failed (the same file); float8 products with K in parts by CUDA: 23 tests passed, none failed "
    "(benchmarks/results/cuda_gemm_few_rows_h200.json); the same bits of 200 calls by CUDA: 12 tests passed, none "
    "failed (the same file)"
)

KERNELS = (
    Kernel(
        op="fp4_gemm",
        name="cuda.fp4_gemm",
        target="kernelhub.backends.cuda.gemm.fp4:Fp4Gemm",
        summary="the weight decoded in registers for wgmma while products are under way, K cut into equal parts",
        band=Band.PORTABLE,
        constraints=(
            OnDevice("nvidia", only=((9, 0),)),
            *MACHINE[1:],
            dtype_in("a_format", "bfloat16"),
            MultipleOf("k", 32, why="TMA reads rows of whole 16 bytes"),
            anything("b_format", "out_dtype", "n"),
        ),
        features=frozenset({"bias"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        standings=(verified("hopper", evidence=_FP4_RAN),),
    ),
    Kernel(
        op="fp8_gemm",
        name="cuda.fp8_gemm",
        target="kernelhub.backends.cuda.gemm.fp8:Fp8Gemm",
        summary="in CUDA C++: tiles of 256, 192 or 128 rows, or K in parts over a cluster where tiles are few",
        band=Band.PORTABLE,
        constraints=(
            OnDevice("nvidia", only=((9, 0),)),
            *MACHINE[1:],
            OneOf("scaling", (BLOCK,), why="it scales the sums of every 128 columns"),
            dtype_in("out_dtype", "bfloat16"),
            dtype_in("a_scale_dtype", FLOAT),
            dtype_in("b_scale_dtype", FLOAT),
            MultipleOf("k", 16, why="TMA reads rows of whole 16 bytes"),
            anything("n", "rows"),
        ),
        features=frozenset({"bias"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        source="DeepSeek-V3 (2024), section 3.3; the tiles and the sharing are those of DeepGEMM on Hopper",
        standings=(verified("hopper", evidence=_FP8_RAN),),
    ),
)
