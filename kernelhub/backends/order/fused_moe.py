"""Order of the kernels of `fused_moe`."""

from kernelhub.dispatch.order import Line

# FlashInfer's. The first is right on an H200, with bfloat16; built with one tile of each kind it took 1.25 times (4096
# tokens) to 2.2 times (one) what triton.experts does. The others have not run on a GPU here.
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

LINES = (
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
    Line(
        "*",
        "*",
        ("triton.experts", *_FLASHINFER, "torch.experts"),
        "measured on an H200, the only GPU so far (benchmarks/results/moe_h200.json)",
    ),
)
