"""Where CUTLASS's kernels of vLLM and SGLang ran, and the devices that both projects state.

Of SGLang's library only sglang-kernel 0.4.5 loaded with the torch that the GPU had; it has no product in blocks.
"""

from __future__ import annotations

from kernelhub.dispatch.standing import published, verified

_VLLM = "https://github.com/vllm-project/vllm/pull"
_SGLANG = "https://github.com/sgl-project/sglang/pull"
_H200 = verified(
    "hopper",
    evidence="NVIDIA H200, 2026-11-21, torch 2.11.0+cu130, vllm 0.33.0, its library by itself: 56 tests passed "
    "(benchmarks/results/libraries_h200.json)",
)

SCALED_MM = (
    _H200,
    published(
        "ada", evidence="vLLM supports FP8 W8A8 on Ada: https://docs.vllm.ai/en/stable/features/quantization/fp8/"
    ),
    published("blackwell", evidence=f"vLLM added CUTLASS's float8 products for sm_100: {_VLLM}/13798"),
    published("blackwell_rtx", evidence=f"vLLM added CUTLASS's float8 products for sm_120: {_VLLM}/17280"),
)
BLOCKWISE = (
    _H200,
    published("blackwell", evidence=f"vLLM's authors timed it on sm_100: {_VLLM}/31185"),
    published(
        "blackwell_rtx",
        evidence="users run it on sm_120, where n has to be a multiple of 128: "
        "https://github.com/vllm-project/vllm/issues/47990",
    ),
)
FP4 = (
    published(
        "blackwell",
        evidence="vLLM picks among its kernels of NVFP4 by the GPU, this one on Blackwell: "
        "https://github.com/vllm-project/vllm/pull/49376",
    ),
    published("blackwell_rtx", evidence=f"vLLM added it for sm_120, tested on an RTX 5090: {_VLLM}/21309"),
)
GROUPS_NVFP4 = (
    published("blackwell", evidence=f"vLLM has it for sm_100, as the change says that adds sm_120: {_VLLM}/29242"),
    published("blackwell_rtx", evidence=f"vLLM added it for sm_120, run on an RTX 5090: {_VLLM}/29242"),
)
GROUPS_MXFP4 = (
    published(
        "blackwell",
        evidence="vLLM runs its experts of MXFP4 by it on sm_100: https://github.com/vllm-project/vllm/blob/v0.33.0/"
        "vllm/model_executor/layers/fused_moe/experts/cutlass_moe.py",
    ),
)
SGL_SCALED_MM = (
    verified(
        "hopper",
        evidence="NVIDIA H200, 2026-11-28, torch 2.11.0+cu130, sglang-kernel 0.4.5: 79 tests passed "
        "(benchmarks/results/sgl_kernel_h200.json)",
    ),
    published("ada", evidence=f"SGLang added its float8 products for sm_89 and sm_90: {_SGLANG}/3047"),
    published("blackwell", evidence=f"SGLang added its float8 products for sm_100: {_SGLANG}/4558"),
)
SGL_BLOCKWISE = (published("hopper", evidence=f"SGLang's authors timed it beside DeepGEMM: {_SGLANG}/5820"),)
