"""Records of the C++ kernels of products with float4 weights."""

from __future__ import annotations

from kernelhub.backends.cpp.requirements import MACHINE, STANDINGS
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.kernel import Band, Kernel

KERNELS = (
    Kernel(
        op="fp4_gemm",
        name="cpp.fp4_gemm",
        target="kernelhub.backends.cpp.gemm.fp4.adapter:Fp4Gemm",
        summary="weights are read once, as codes, and decoded in registers or in the first-level cache",
        band=Band.TUNED,
        constraints=(
            *MACHINE,
            anything("a_format", "b_format", "out_dtype", "n", "k"),
        ),
        features=frozenset({"bias"}),
        deterministic=True,
        standings=STANDINGS,
    ),
)
