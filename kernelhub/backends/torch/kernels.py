"""The torch backend: what it is, and the records of every family of ops."""

from __future__ import annotations

from kernelhub.backends.torch.attention import kernels as attention
from kernelhub.backends.torch.gemm.fp4 import kernels as fp4_gemm
from kernelhub.backends.torch.merge import kernels as merge
from kernelhub.backends.torch.mla import kernels as mla
from kernelhub.backends.torch.quant import kernels as quant
from kernelhub.dispatch.kernel import Backend

BACKEND = Backend("torch", "operators of PyTorch itself", package="torch", homepage="https://pytorch.org")

KERNELS = (
    *attention.KERNELS,
    *merge.KERNELS,
    *mla.KERNELS,
    *quant.KERNELS,
    *fp4_gemm.KERNELS,
)
