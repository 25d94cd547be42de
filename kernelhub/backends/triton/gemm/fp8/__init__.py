"""Records of the Triton kernels of float8 products."""

from __future__ import annotations

from kernelhub.backends.triton import standings
from kernelhub.backends.triton.requirements import MACHINE
from kernelhub.dispatch.constraint import OneOf, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.gemm.fp8.batched.problem import SCALINGS as BATCH_SCALINGS
from kernelhub.ops.gemm.fp8.problem import E8M0, FLOAT, FLOATS, HALVES, SCALINGS

KERNELS = (
    Kernel(
        op="fp8_gemm",
        name="triton.fp8_gemm",
        target="kernelhub.backends.triton.gemm.fp8.adapter:Fp8Gemm",
        summary="few rows: weights as the left operand, K split; more: tiles; many scaled by mx: decoded for cuBLAS",
        band=Band.PORTABLE,
        constraints=(
            *MACHINE,
            OneOf("scaling", SCALINGS),
            dtype_in("out_dtype", *FLOATS),
            dtype_in("a_scale_dtype", FLOAT, E8M0),
            dtype_in("b_scale_dtype", FLOAT, E8M0),
            anything("n", "k", "rows"),
        ),
        features=frozenset({"bias", "e5m2", *(f"weight_only={dtype}" for dtype in HALVES)}),
        graph=GraphLevel.FULL,
        configurable=True,
        deterministic=True,
        source="DeepSeek-V3 (2024), section 3.3",
        standings=standings.STANDINGS,
    ),
    Kernel(
        op="bmm_fp8",
        name="triton.bmm_fp8",
        target="kernelhub.backends.triton.gemm.fp8.batched_adapter:BmmFp8",
        summary="the tiles of fp8_gemm for every matrix, few rows as the right operand",
        band=Band.PORTABLE,
        constraints=(
            *MACHINE,
            OneOf("a_scaling", BATCH_SCALINGS),
            OneOf("b_scaling", BATCH_SCALINGS),
            dtype_in("out_dtype", *FLOATS),
            anything("n", "k"),
        ),
        features=frozenset({"e5m2=a", "e5m2=b"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        standings=standings.STANDINGS,
    ),
)
