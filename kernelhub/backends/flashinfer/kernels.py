"""The flashinfer backend and its records."""

from __future__ import annotations

from kernelhub.backends.flashinfer import (
    attention,
    cascade,
    comm,
    cudnn,
    cutlass,
    gemm,
    grouped,
    mla,
    moe,
    quant,
    trtllm,
)
from kernelhub.backends.flashinfer.comm import experts
from kernelhub.dispatch.kernel import Backend, Watch

BACKEND = Backend(
    "flashinfer",
    "FlashInfer's kernels, compiled at first use unless they were built ahead",
    package="flashinfer",
    homepage="https://github.com/flashinfer-ai/flashinfer",
    watches=(
        Watch("flashinfer.jit.core", "kernelhub.backends.flashinfer.watch:watch"),
        Watch("flashinfer.jit.cute_dsl_core", "kernelhub.backends.flashinfer.watch:watch"),
        Watch("flashinfer.jit.cubin_loader", "kernelhub.backends.flashinfer.watch:watch_downloads"),
        Watch("cuda.tile._compile", "kernelhub.backends.flashinfer.watch:watch_tiles"),
        Watch("flashinfer.autotuner", "kernelhub.backends.flashinfer.watch:watch_tuner"),
        Watch(
            "flashinfer.gemm.kernels.grouped_gemm_masked_blackwell",
            "kernelhub.backends.flashinfer.watch:watch_masked",
        ),
    ),
)

KERNELS = (
    *attention.KERNELS,
    *cascade.KERNELS,
    *comm.KERNELS,
    *experts.KERNELS,
    *mla.KERNELS,
    *trtllm.KERNELS,
    *cudnn.KERNELS,
    *cutlass.KERNELS,
    *gemm.KERNELS,
    *grouped.KERNELS,
    *moe.KERNELS,
    *quant.KERNELS,
)

KNOWN_BAD = (
    *attention.KNOWN_BAD,
    *mla.KNOWN_BAD,
    *trtllm.KNOWN_BAD,
    *cudnn.KNOWN_BAD,
    *gemm.KNOWN_BAD,
    *moe.KNOWN_BAD,
    *quant.KNOWN_BAD,
)
