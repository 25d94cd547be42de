"""The cuda backend and its records."""

from __future__ import annotations

from kernelhub.backends.cuda import attention, comm, fused_quant, gemm, indexer, kv_cache, merge, mla, moe, quant
from kernelhub.dispatch.kernel import Backend

BACKEND = Backend(
    "cuda",
    "our CUDA kernels, compiled by NVRTC at first use",
    package="cuda",
    homepage="https://nvidia.github.io/cuda-python/cuda-bindings",
)

KERNELS = (
    *attention.KERNELS,
    *comm.KERNELS,
    *fused_quant.KERNELS,
    *gemm.KERNELS,
    *indexer.KERNELS,
    *kv_cache.KERNELS,
    *merge.KERNELS,
    *mla.KERNELS,
    *moe.KERNELS,
    *quant.KERNELS,
)
