"""Where FlashInfer's kernels ran, and the devices that the library states.

What of a library is for which devices follows from the checks of its functions, as read in 0.7.2; its README lists the
devices that it is for at all.
"""

from __future__ import annotations

from kernelhub.dispatch.standing import Standing, opt_in, published, verified

_ON = "NVIDIA H200, 2026-11-21, torch 2.11.0+cu130"
_RESULTS = "(benchmarks/results/libraries_h200.json)"
_GPUS = "https://github.com/flashinfer-ai/flashinfer#gpu-support"
_DOCS = "https://docs.flashinfer.ai"
_CUDNN = (
    f"{_ON}, flashinfer-python 0.7.2.post1, its calls of cuDNN; nvidia-cudnn-frontend 1.32.0, cuDNN 9.19: "
    f"157 tests passed {_RESULTS}"
)
_ATTENTION = (
    f"{_ON}, flashinfer-python 0.6.18.post1, modules built ahead: attention, merging: 520 tests passed {_RESULTS}"
)
_PRODUCTS = (
    f"{_ON}, flashinfer-python 0.6.18.post1, modules built ahead: products; nvidia-cudnn-frontend 1.32.0: "
    f"135 tests passed {_RESULTS}"
)
_EXPERTS = f"{_ON}, flashinfer-python 0.6.18.post1, part of the experts' module for sm_90: 27 tests passed {_RESULTS}"


def _stated(*families: str, what: str, link: str, figure: str = "", seconds: float = 20.0) -> Standing:
    """A statement of the library; verification takes minutes if the kernel has to be compiled first."""
    return published(*families, evidence=f"{what}: {link}", figure=figure, seconds=seconds)


_MINUTES = 300.0  # what a module of prefill takes to compile on two cores, unless it was built ahead
_FA2_ON = _stated(
    "ampere",
    "ada",
    "blackwell",
    "blackwell_rtx",
    what="FlashInfer supports sm_75 to sm_121, and its FlashAttention-2 modules are for all from sm_80 on",
    link=_GPUS,
    seconds=_MINUTES,
)

# Attention, merging and small kernels.
FA2 = (verified("hopper", evidence=_ATTENTION), _FA2_ON)
FA3 = (verified("hopper", evidence=_ATTENTION),)
XQA = (
    verified("hopper", evidence=_ATTENTION),
    _stated(
        "blackwell",
        "blackwell_rtx",
        what="XQA is for sm_90, sm_100 and sm_120; the library's decode uses it where there is no trtllm-gen",
        link=f"{_DOCS}/api/attention.html",
        seconds=60.0,
    ),
)
CUDNN = (verified("hopper", evidence=_CUDNN),)
CUDNN_PROMISE = (
    opt_in(
        "hopper",
        evidence=f"the caller must guarantee that the unused end of a page has no NaN. On such caches: {_CUDNN}",
    ),
)

# TensorRT-LLM's attention and CUTLASS's, for datacentre Blackwell.
TRTLLM_GEN = (
    _stated(
        "blackwell",
        what="FlashInfer's decode runs trtllm-gen on sm_100 and sm_103; vLLM timed it beside FlashInfer's own",
        link="https://github.com/vllm-project/vllm/pull/19825",
        figure="1.4x of FlashInfer's own decode, 64 x 1024 tokens in bfloat16",
    ),
)
TRTLLM_CONTEXT = (
    opt_in(
        "blackwell",
        evidence="the caller must guarantee that the unused end of a page has no NaN, as TensorRT-LLM does: "
        "https://github.com/NVIDIA/TensorRT-LLM/pull/18925",
    ),
)
TRTLLM = (
    _stated(
        "blackwell",
        what="TensorRT-LLM's binaries of attention are for sm_100 and sm_103, where vLLM uses them for MLA",
        link="https://docs.vllm.ai/en/latest/design/attention_backends/",
    ),
)
CUTLASS_ATTENTION = (
    _stated(
        "blackwell",
        what="the library's CUTLASS attention is for sm_100, where vLLM can use it",
        link="https://docs.vllm.ai/en/latest/design/attention_backends/",
        seconds=_MINUTES,
    ),
)
XQA_LATENT = (
    _stated(
        "blackwell_rtx",
        what="XQA of latents is for sm_120 and sm_121, where the library's latent decode uses it",
        link=f"{_DOCS}/api/attention.html",
        seconds=60.0,
    ),
)

# Products.
_COMPILED_PRODUCTS = "the library's float8 products by cuBLAS and cuDNN are for sm_89, sm_90 and Blackwell"
CUBLAS = (
    verified("hopper", evidence=_PRODUCTS),
    _stated("ada", "blackwell", "blackwell_rtx", what=_COMPILED_PRODUCTS, link=f"{_DOCS}/api/gemm.html", seconds=60.0),
)
CUDNN_PRODUCTS = (
    verified("hopper", evidence=_PRODUCTS),
    _stated("ada", "blackwell", what=_COMPILED_PRODUCTS, link=f"{_DOCS}/api/gemm.html"),
)
BLOCKS_HOPPER = (
    opt_in(
        "hopper",
        evidence="it runs nvcc for some seconds at the first call of each class of row counts, also while serving. "
        f"Tests: {_PRODUCTS}",
    ),
)
SEGMENTS = (verified("hopper", evidence=_PRODUCTS),)
DEQUANTIZE = (verified("hopper", evidence=_PRODUCTS), _FA2_ON)
BLACKWELL_PRODUCTS = (
    _stated(
        "blackwell",
        what="the library's products in blocks, of MXFP8 and by CUTLASS are for sm_100 and sm_103",
        link=f"{_DOCS}/api/gemm.html",
        seconds=_MINUTES,
    ),
)
FP4_CUTLASS = (
    _stated(
        "blackwell",
        what="float4 products are for Blackwell; by vLLM's timing CUTLASS's passes TensorRT-LLM's from 64 rows on",
        link="https://github.com/vllm-project/vllm/pull/42235",
        figure="1.2x of flashinfer.fp4_trtllm from 64 rows on",
        seconds=_MINUTES,
    ),
)
FP4_TRTLLM = (
    _stated(
        "blackwell",
        what="float4 products are for Blackwell; by vLLM's timing TensorRT-LLM's is ahead of CUTLASS's up to 32 rows",
        link="https://github.com/vllm-project/vllm/pull/42235",
        figure="1.1x of flashinfer.fp4_cutlass up to 32 rows",
    ),
)
FP4_CUDNN = (
    _stated(
        "blackwell",
        what="float4 products are for Blackwell; FlashInfer prefers cuDNN's to CUTLASS's on a B200, not on a B300",
        link="https://github.com/flashinfer-ai/flashinfer/pull/2404",
    ),
)
GROUPS_RTX = (
    _stated(
        "blackwell_rtx",
        what="the library's grouped products of NVFP4 are for sm_120 and sm_121",
        link=f"{_DOCS}/api/gemm.html",
        seconds=_MINUTES,
    ),
)
GROUPS_BOTH = (
    _stated(
        "blackwell",
        "blackwell_rtx",
        what="the library's grouped products of MXFP8 by MXFP4 are for sm_100 to sm_121",
        link=f"{_DOCS}/api/gemm.html",
        seconds=_MINUTES,
    ),
)

# Mixtures of experts.
_MOE = f"{_DOCS}/api/fused_moe.html"
_CUTLASS_EXPERTS = "the library's CUTLASS experts are for sm_89 to sm_121, by format"
CUTLASS_EXPERTS = (
    verified("hopper", evidence=_EXPERTS),
    _stated("blackwell", what=_CUTLASS_EXPERTS, link=_MOE, seconds=600.0),
)
CUTLASS_EXPERTS_HOPPER = (_stated("hopper", what=_CUTLASS_EXPERTS, link=_MOE, seconds=600.0),)
CUTLASS_EXPERTS_BLACKWELL = (_stated("blackwell", what=_CUTLASS_EXPERTS, link=_MOE, seconds=600.0),)
CUTLASS_EXPERTS_BOTH = (_stated("blackwell", "blackwell_rtx", what=_CUTLASS_EXPERTS, link=_MOE, seconds=600.0),)
TRTLLM_EXPERTS = (_stated("blackwell", what="TensorRT-LLM's binaries of experts are for sm_100 and sm_103", link=_MOE),)

# Quantisation.
OTHER_BITS = (
    opt_in(
        "blackwell",
        "blackwell_rtx",
        evidence="its bits differ from those of the op: see the record",
    ),
)
