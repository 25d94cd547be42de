"""The torch backend: what it is, and the records of every family of ops."""

from __future__ import annotations

from kernelhub.backends.torch.attention import kernels as attention
from kernelhub.backends.torch.gemm.fp4 import kernels as fp4_gemm
from kernelhub.backends.torch.gemm.fp8 import kernels as fp8_gemm
from kernelhub.backends.torch.gemm.grouped import kernels as grouped_gemm
from kernelhub.backends.torch.indexer import kernels as indexer
from kernelhub.backends.torch.linear_attention import kernels as linear_attention
from kernelhub.backends.torch.merge import kernels as merge
from kernelhub.backends.torch.mla import kernels as mla
from kernelhub.backends.torch.moe import kernels as moe
from kernelhub.backends.torch.quant import kernels as quant
from kernelhub.dispatch.kernel import Backend, Watch

BACKEND = Backend(
    "torch",
    "operators of PyTorch itself",
    package="torch",
    homepage="https://pytorch.org",
    portable=True,
    watches=(Watch("torch._dynamo.callback", "kernelhub.backends.torch.watch:watch"),),
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

KNOWN_BAD = (*attention.KNOWN_BAD, *fp8_gemm.KNOWN_BAD)
