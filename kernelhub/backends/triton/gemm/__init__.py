"""The records of matrix products."""

from __future__ import annotations

from kernelhub.backends.triton.gemm import fp4, fp8, grouped

KERNELS = (
    *fp4.KERNELS,
    *fp8.KERNELS,
    *grouped.KERNELS,
)
