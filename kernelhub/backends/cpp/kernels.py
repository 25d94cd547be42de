"""The cpp backend: what it is, and the records of every family of ops."""

from __future__ import annotations

from kernelhub.backends.cpp.gemm.fp8 import kernels as fp8_gemm
from kernelhub.backends.cpp.moe import kernels as moe
from kernelhub.dispatch.kernel import Backend

BACKEND = Backend("cpp", "our C++ kernels for CPUs, compiled at first use", portable=True)

KERNELS = (*fp8_gemm.KERNELS, *moe.KERNELS)
