"""The records of matrix products."""

from __future__ import annotations

from kernelhub.backends.cpp.gemm import fp4, fp8

KERNELS = (*fp4.KERNELS, *fp8.KERNELS)
