"""Records of the torch kernels of products with float4 weights."""

from __future__ import annotations

from kernelhub.backends.torch import standings
from kernelhub.backends.torch.devices import ANYWHERE
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel

KERNELS = (
    Kernel(
        op="fp4_gemm",
        name="torch.dequantized",
        target="kernelhub.backends.torch.gemm.fp4.dequantised:Dequantised",
        summary="the weight is dequantised by blocks of rows and multiplied in float32",
        band=Band.REFERENCE,
        constraints=(ANYWHERE, anything("a_format", "b_format", "out_dtype", "n", "k")),
        features=frozenset({"bias"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        standings=standings.EVERYWHERE,
    ),
)
