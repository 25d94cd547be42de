"""The gluon backend and its records."""

from __future__ import annotations

from kernelhub.backends.gluon import attention, gemm, mla, moe
from kernelhub.dispatch.kernel import Backend

BACKEND = Backend(
    "gluon",
    "our kernels for Hopper, in Triton's Gluon",
    package="triton",
    homepage="https://triton-lang.org",
)

KERNELS = (*attention.KERNELS, *gemm.KERNELS, *mla.KERNELS, *moe.KERNELS)
