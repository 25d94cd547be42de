"""Records of the Triton kernels of products with float4 weights."""

from __future__ import annotations

from kernelhub.backends.triton import standings
from kernelhub.backends.triton.requirements import MACHINE
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.dispatch.problem import CHECKPOINT

KERNELS = (
    Kernel(
        op="fp4_gemm",
        name="triton.fp4_gemm",
        target="kernelhub.backends.triton.gemm.fp4.adapter:Fp4Gemm",
        summary="the weight decoded in registers, K split for few rows; from 512 rows on decoded once for cuBLAS",
        band=Band.PORTABLE,
        constraints=(*MACHINE, anything("a_format", "b_format", "out_dtype", "n", "k")),
        features=frozenset({"bias"}),
        layouts=(CHECKPOINT, "fp4.tiles64x128.v1"),
        packs_to="fp4.tiles64x128.v1",
        graph=GraphLevel.FULL,
        deterministic=True,
        standings=standings.STANDINGS,
    ),
)
