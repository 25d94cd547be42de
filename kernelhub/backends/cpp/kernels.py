"""The cpp backend and its records."""

from __future__ import annotations

from kernelhub.backends.cpp import attention, gemm, moe
from kernelhub.dispatch.kernel import Backend

BACKEND = Backend("cpp", "our C++ kernels for CPUs, compiled in a wheel, else at first use", portable=True)

KERNELS = (*attention.KERNELS, *gemm.KERNELS, *moe.KERNELS)
