"""The triton backend: what it is, and the records of every family of ops."""

from __future__ import annotations

from kernelhub.backends.triton.attention import kernels as attention
from kernelhub.backends.triton.gemm.fp4 import kernels as fp4_gemm
from kernelhub.backends.triton.gemm.fp8 import kernels as fp8_gemm
from kernelhub.backends.triton.gemm.grouped import kernels as grouped_gemm
from kernelhub.backends.triton.indexer import kernels as indexer
from kernelhub.backends.triton.linear_attention import kernels as linear_attention
from kernelhub.backends.triton.merge import kernels as merge
from kernelhub.backends.triton.mla import kernels as mla
from kernelhub.backends.triton.moe import kernels as moe
from kernelhub.backends.triton.quant import kernels as quant
from kernelhub.dispatch.kernel import Backend, Watch

BACKEND = Backend(
    "triton",
    "our portable kernels in Triton",
    package="triton",
    homepage="https://triton-lang.org",
    portable=True,
    watches=(Watch("triton", "kernelhub.backends.triton.watch:watch"),),
)

KERNELS = (
    *attention.KERNELS,
    *fp4_gemm.KERNELS,
    *fp8_gemm.KERNELS,
    *grouped_gemm.KERNELS,
    *indexer.KERNELS,
    *linear_attention.KERNELS,
    *merge.KERNELS,
    *mla.KERNELS,
    *moe.KERNELS,
    *quant.KERNELS,
)
