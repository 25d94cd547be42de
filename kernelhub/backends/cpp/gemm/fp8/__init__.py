"""Records of the C++ kernels of float8 products."""

from __future__ import annotations

from kernelhub.backends.cpp import requirements
from kernelhub.backends.cpp.requirements import MACHINE
from kernelhub.dispatch.constraint import OneOf, anything, dtype_in
from kernelhub.dispatch.kernel import Band, Kernel
from kernelhub.ops.gemm.fp8.batched.problem import SCALINGS as BATCH_SCALINGS
from kernelhub.ops.gemm.fp8.problem import E8M0, FLOAT, FLOATS, SCALINGS

KERNELS = (
    Kernel(
        op="fp8_gemm",
        name="cpp.fp8_gemm",
        target="kernelhub.backends.cpp.gemm.fp8.adapter:Fp8Gemm",
        summary="weights are read once, as bytes; dot products for few rows, decoded panels for more",
        band=Band.TUNED,
        constraints=(
            *MACHINE,
            OneOf("scaling", SCALINGS),
            dtype_in("out_dtype", *FLOATS),
            dtype_in("a_scale_dtype", FLOAT, E8M0),
            dtype_in("b_scale_dtype", FLOAT, E8M0),
            anything("n", "k", "rows"),
        ),
        features=frozenset({"bias"}),
        deterministic=True,
        standings=requirements.STANDINGS,
    ),
    Kernel(
        op="bmm_fp8",
        name="cpp.bmm_fp8",
        target="kernelhub.backends.cpp.gemm.fp8.adapter:BmmFp8",
        summary="the product of fp8_gemm per matrix, one thread per matrix",
        band=Band.TUNED,
        constraints=(
            *MACHINE,
            OneOf("a_scaling", BATCH_SCALINGS),
            OneOf("b_scaling", BATCH_SCALINGS),
            dtype_in("out_dtype", *FLOATS),
            anything("n", "k"),
        ),
        deterministic=True,
        standings=requirements.STANDINGS,
    ),
)
