"""The triton backend and its records."""

from __future__ import annotations

from kernelhub.backends.triton import (
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
    *comm.KERNELS,
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
