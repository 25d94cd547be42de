"""Records of the CUDA kernels of matrix products."""

from __future__ import annotations

from kernelhub.backends.cuda.requirements import MACHINE
from kernelhub.dispatch.constraint import MultipleOf, OnDevice, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.dispatch.standing import verified

_RAN = (
    "NVIDIA H200, 2026-11-28, torch 2.11.0+cu130, float4 products by CUDA: 93 tests passed, none failed "
    "(benchmarks/results/cuda_fp4_h200.json)"
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
        standings=(verified("hopper", evidence=_RAN),),
    ),
)
