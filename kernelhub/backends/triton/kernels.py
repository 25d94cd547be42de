"""The triton backend: what it is, and the records of every family of ops."""

from __future__ import annotations

from kernelhub.backends.triton.attention import kernels as attention
from kernelhub.backends.triton.gemm.fp8 import kernels as fp8_gemm
from kernelhub.backends.triton.merge import kernels as merge
from kernelhub.backends.triton.mla import kernels as mla
from kernelhub.dispatch.kernel import Backend

BACKEND = Backend("triton", "our portable kernels in Triton", package="triton", homepage="https://triton-lang.org")

KERNELS = (
    *attention.KERNELS,
    *fp8_gemm.KERNELS,
    *merge.KERNELS,
    *mla.KERNELS,
)
