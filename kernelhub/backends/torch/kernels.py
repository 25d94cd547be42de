"""The torch backend and its records."""

from __future__ import annotations

from kernelhub.backends.torch import (
    attention,
    comm,
    fused_quant,
    gemm,
    indexer,
    kv_cache,
    linear_attention,
    merge,
    mla,
    moe,
    quant,
)
from kernelhub.backends.torch.comm import experts
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
    *comm.KERNELS,
    *experts.KERNELS,
    *fused_quant.KERNELS,
    *gemm.KERNELS,
    *indexer.KERNELS,
    *kv_cache.KERNELS,
    *linear_attention.KERNELS,
    *merge.KERNELS,
    *mla.KERNELS,
    *moe.KERNELS,
    *quant.KERNELS,
)

KNOWN_BAD = (*attention.KNOWN_BAD, *gemm.KNOWN_BAD)
