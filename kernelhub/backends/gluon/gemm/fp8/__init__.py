"""Records of the Gluon kernels of float8 products."""

from __future__ import annotations

from kernelhub.backends.gluon.requirements import MACHINE
from kernelhub.backends.gluon.standings import standings
from kernelhub.dispatch.constraint import MultipleOf, OneOf, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.gemm.fp8.problem import BLOCK, E8M0, FLOAT, FLOATS, ROW, TENSOR

KERNELS = (
    Kernel(
        op="fp8_gemm",
        name="gluon.fp8_gemm",
        target="kernelhub.backends.gluon.gemm.fp8.adapter:Fp8Gemm",
        summary="tiles of 256 or 128 rows loaded by TMA, sums moved to float32 every 128 columns",
        band=Band.PORTABLE,
        constraints=(
            *MACHINE,
            OneOf("scaling", (TENSOR, ROW, BLOCK), why="the sums of other scalings are scaled elsewhere"),
            dtype_in("out_dtype", *FLOATS),
            dtype_in("a_scale_dtype", FLOAT, E8M0),
            dtype_in("b_scale_dtype", FLOAT, E8M0),
            MultipleOf("k", 16, why="TMA reads rows of whole 16 bytes"),
            anything("n", "rows"),
        ),
        features=frozenset({"bias"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        source="DeepSeek-V3 (2024), section 3.3; the tiles are those of DeepGEMM on Hopper",
        standings=standings(207),
    ),
)
