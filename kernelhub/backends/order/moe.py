"""Order of the kernels of mixtures of experts."""

from kernelhub.dispatch.order import Line, first

# FlashInfer's. On an H200 the first, with bfloat16, built with one tile of each kind, took 1.25 times (4096 tokens) to
# 2.2 times (one) what triton.experts does.
_FLASHINFER = (
    "flashinfer.cutlass_experts",
    "flashinfer.cutlass_experts_fp8",
    "flashinfer.cutlass_experts_mxfp4",
    "flashinfer.trtllm_experts",
    "flashinfer.trtllm_experts_fp8",
    "flashinfer.trtllm_experts_mxfp4",
    # Of libraries in general, binaries that were chosen for a device before those that are compiled for it.
    "flashinfer.trtllm_experts_nvfp4",
    "flashinfer.cutlass_experts_nvfp4",
    "flashinfer.trtllm_experts_mxfp8",
    "flashinfer.cutlass_experts_mxfp8",
    "flashinfer.trtllm_experts_mxfp8_blocks",
    "flashinfer.trtllm_experts_mxint4",
)
_TRTLLM = tuple(name for name in _FLASHINFER if ".trtllm_" in name)
_CUTLASS = tuple(name for name in _FLASHINFER if ".cutlass_" in name)
_ALL = ("triton.experts", "gluon.experts", "gluon.experts_halves", *_FLASHINFER, "torch.experts")
_VLLM = "https://github.com/vllm-project/vllm/tree/v0.33.0/vllm/model_executor/layers/fused_moe/oracle"

FUSED_MOE = (
    # Times of torch.experts over those of cpp.experts on one core. 8 experts of 7168 x 256, fp8 in blocks, 1, 4, 16,
    # 64 and 256 tokens, all to all: 14.4, 10.6, 5.7, 4.6, 4.4. 4 of 2880 x 1440, MXFP4, 1, 16, 64 and 256 tokens: 16.7,
    # 4.1, 2.3, 1.5. 16 of 2048 x 768, NVFP4, 1, 16 and 256 tokens: 59, 19, 3.8. Weights that are not quantised are
    # torch's.
    Line(
        "cpu",
        "*",
        ("cpp.experts", "torch.experts", "triton.experts"),
        "measured on an EPYC of Zen 5, torch 2.13, 2026-11-20; Triton is only interpreted on a CPU",
    ),
    # Qwen3 30B-A3B in bfloat16, 64 tokens: 0.316 and 18.6 ms; DeepSeek V3.2 / 8 in fp8 blocks: 0.350 and 95.5.
    # In fp8 blocks gluon.experts is level with triton.experts with few tokens. On an H200 (gluon_experts_h200.json),
    # Qwen3 30B-A3B, 16, 64, 256 and 512 tokens: 0.109, 0.163, 0.171 and 0.177 against 0.108, 0.160, 0.189 and 0.247;
    # 256 of DeepSeek V3.2 2.59 and 2.61, of an eighth of its width 0.381 and 0.375; one of Qwen3 0.033 and 0.027 in the
    # kernel before (gluon_h200.json). In bfloat16 gluon.experts_halves (gluon_more_h200.json), 1, 16, 64 and 256
    # tokens: Qwen3 0.042, 0.195, 0.300 and 0.315 against 0.029, 0.187, 0.288 and 0.303; Mixtral 8x7B 0.235, 0.676,
    # 0.684 and 0.748 against 0.233, 0.706, 0.751 and 0.943; gpt-oss 20B's shape 0.082, 0.396, 0.410 and 0.422 against
    # 0.070, 0.383, 0.408 and 0.437.
    Line(
        "*",
        "*",
        _ALL,
        "measured on an H200, the only GPU so far (benchmarks/results/moe_h200.json)",
    ),
    Line(
        "hopper",
        "many",
        first(("gluon.experts", "gluon.experts_halves"), _ALL),
        "measured in fp8 blocks, 512, 1024, 2048, 4096 and 8192 tokens, on an H200: Qwen3 30B-A3B 0.177, 0.204, 0.276, "
        "0.434 and 0.774 ms, with triton.experts 0.247, 0.268, 0.424, 0.740 and 1.37; DeepSeek V3.2, 1024 and 4096, "
        "2.71 and 3.94, 4.01 and 6.74, an eighth of its experts' width 0.440 and 0.806, 0.507 and 1.13; 512 and 1024, "
        "MiniMax M2.5 on one of 4 ranks 0.261 and 0.279, 0.287 and 0.320, GLM-5 on one of 8 0.359 and 0.384, 0.395 and "
        "0.545 "
        "(benchmarks/results/gluon_experts_h200.json), and 512 on an H100, of the kernel before, 4.04 and 4.31 "
        "(benchmarks/results/experts_sort_h100.json); in bfloat16, 512, 1024, 2048 and 4096 tokens, on an H200: Qwen3 "
        "0.322, 0.357, 0.452 and 0.703, with triton.experts 0.343, 0.373, 0.465 and 0.826; Mixtral 8x7B 1.05, 1.57, "
        "2.70 and 4.68, 1.04, 1.77, 3.45 and 6.09; gpt-oss 20B's shape 0.466, 0.619, 0.975 and 1.62, 0.495, 0.606, "
        "1.11 and 1.97 "
        "(benchmarks/results/gluon_more_h200.json)",
    ),
    # Few tokens and many have one order there: the layouts that TensorRT-LLM's and CUTLASS's kernels pack weights in
    # differ (but for up_gate_blocks), so a choice by tokens would hold a layer's weights twice. vLLM chooses once, too,
    # when a model is loaded (moe_backend of its KernelConfig). Few are what a step of decode has.
    Line(
        "blackwell",
        "*",
        first((*_TRTLLM, *_CUTLASS), _ALL),
        "vLLM tries TensorRT-LLM's, which are for few tokens, then CUTLASS's, which are for many, then Triton's, with "
        f"every format ({_VLLM}); `kernelhub tune` ranks them by number of tokens",
        expected=True,
    ),
    Line(
        "blackwell_rtx",
        "*",
        first(_CUTLASS, _ALL),
        f"there are no binaries of TensorRT-LLM's for sm_120; vLLM tries CUTLASS's before Triton's ({_VLLM})",
        expected=True,
    ),
)

_H200 = "measured on an H200, the only GPU so far (benchmarks/results/moe_h200.json)"

ROUTE_EXPERTS = (
    # Times of torch.routing over those of cpp.routing, medians of three runs. 256 experts in groups, sigmoid with a
    # bias, 1, 8, 64 and 1024 tokens: 33 to 41, 20 to 29, 12 to 19, 9.9 to 12. 128 experts, softmax: 12 to 16, 11 to 14,
    # 6 to 12, 5.4 to 9.3.
    Line(
        "cpu",
        "*",
        ("cpp.routing", "torch.routing", "triton.routing"),
        "measured on an EPYC of Zen 3, one thread, torch 2.13, 2026-11-26; Triton is only interpreted on a CPU",
    ),
    # H100, cuda.routing / triton.routing in a graph, 1, 64, 1024 and 4096 tokens: DeepSeek V3.2's 2.8 / 6.8, 3.2 / 7.1,
    # 3.8 / 8.2 and 8.2 / 19.4 us; gpt-oss's 2.2 / 2.9, 2.3 / 3.1, 2.6 / 3.2, 3.6 / 4.9; Qwen3's between them.
    Line(
        "hopper",
        "*",
        ("cuda.routing", "triton.routing", "torch.routing"),
        "measured on an H100, torch 2.11.0, Triton 3.6.0, 2026-11-26 (benchmarks/results/routing_h100.json)",
    ),
    # DeepSeek V3.2's, 4096 tokens: 0.024 and 0.512 ms.
    Line("*", "*", ("triton.routing", "cuda.routing", "torch.routing"), _H200),
)

ORDER = {
    "fused_moe": FUSED_MOE,
    "route_experts": ROUTE_EXPERTS,
}
