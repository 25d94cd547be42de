"""The triton backend: what it is, and the records of every family of ops."""

from __future__ import annotations

from kernelhub.backends.triton.attention import kernels as attention
from kernelhub.backends.triton.gemm.fp4 import kernels as fp4_gemm
from kernelhub.backends.triton.merge import kernels as merge
from kernelhub.backends.triton.mla import kernels as mla
from kernelhub.backends.triton.quant import kernels as quant
from kernelhub.dispatch.kernel import Backend

BACKEND = Backend("triton", "our portable kernels in Triton", package="triton", homepage="https://triton-lang.org")

KERNELS = (
    *attention.KERNELS,
    *merge.KERNELS,
    *mla.KERNELS,
    *quant.KERNELS,
    *fp4_gemm.KERNELS,
)
