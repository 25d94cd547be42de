"""Order of the kernels of float4 products."""

from kernelhub.dispatch.order import Line, first

_CUDA = "cuda.fp4_gemm"
_MARLIN = ("marlin.nvfp4_bfloat16", "marlin.nvfp4_float16", "marlin.mxfp4")
# For Blackwell.
_NOT_RUN = ("cutlass.vllm_fp4", *(f"flashinfer.fp4_{name}" for name in ("cutlass", "trtllm", "cudnn")))
_ALL = ("triton.fp4_gemm", *_MARLIN, *_NOT_RUN, "torch.dequantized")
_H200 = "measured on an H200 (benchmarks/results/cuda_fp4_h200.json); Marlin's in benchmarks/results/gemm_h200.json"

FP4_GEMM = (
    # 4096 x 4096 of mxfp4, bfloat16 rows, over torch.dequantized: 1 row 23 times as fast, 16 rows 8, 256 rows as fast.
    Line(
        "cpu",
        "*",
        ("cpp.fp4_gemm", "torch.dequantized", "triton.fp4_gemm"),
        "measured on an EPYC of Zen 3, one thread, torch 2.13, 2026-11-25; Triton is only interpreted on a CPU",
    ),
    # From 512 rows on the weight is decoded once: 57344 x 8192, 10240 x 8192 and 7168 x 16384 with 4096 rows took 5.93,
    # 0.999 and 1.33 ms against 9.62, 1.70 and 2.42 decoded in registers, 512 rows 0.995, 0.179 and 0.239 against 1.14,
    # 0.235 and 0.310; bfloat16 weights 5.03, 0.877 and 1.20 with 4096 rows.
    # Packed weights, ours and Marlin's (vLLM 0.33.0): 10240 x 8192 with 1, 16, 64, 256 and 1024 rows 0.033, 0.035,
    # 0.057, 0.149, 0.291 and 0.030, 0.031, 0.050, 0.141, 0.502; 57344 x 8192 0.115, 0.118, 0.180, 0.506, 1.64 and
    # 0.109, 0.119, 0.187, 0.706, 2.93; 5760 x 2880 of mxfp4 0.019, 0.019, 0.028, 0.049, 0.069 and 0.015, 0.015, 0.022,
    # 0.047, 0.146.
    # One packed weight serves both decode and prefill, where Marlin takes up to twice the time.
    Line(
        "*",
        "*",
        _ALL,
        "measured on an H200, the only GPU so far (benchmarks/results/gemm_h200.json)",
    ),
    # In CUDA graphs, cold weights, 128, 192, 256, 512, 1024 and 4096 rows, cuda.fp4_gemm and Triton's: 10240 x 8192 of
    # nvfp4 0.058, 0.070, 0.081, 0.152, 0.278, 1.08 ms and 0.080, 0.158, 0.158, 0.191, 0.317, 1.11; 8192 x 28672 0.131,
    # 0.160, 0.194, 0.353, 0.722, 2.94 and 0.258, 0.298, 0.311, 0.526, 0.842, 2.94; 4096 x 6144 0.024, 0.028, 0.032,
    # 0.057, 0.081, 0.330 and 0.060, 0.061, 0.062, 0.060, 0.099, 0.339; 5760 x 2880 of mxfp4 0.025, 0.030, 0.035, 0.049,
    # 0.076, 0.245 and 0.046, 0.042, 0.046, 0.045, 0.070, 0.254. Up to 64 rows Triton's is ahead,
    # but for 1 row of mxfp4.
    *(Line("hopper", regime, first((_CUDA,), _ALL), _H200) for regime in ("some", "nvfp4_many")),
    *(Line("hopper", regime, first(_ALL[:1], (_CUDA, *_ALL)), _H200) for regime in ("few", "mxfp4_many")),
    # cuDNN makes a plan for each number of rows, and TensorRT-LLM's cannot be captured in a graph. That one reads
    # weights in another order than CUTLASS's, so a choice by rows would hold the weight twice, or arrange it in every
    # call.
    Line(
        "blackwell",
        "*",
        first(("flashinfer.fp4_cutlass", "cutlass.vllm_fp4", "flashinfer.fp4_trtllm", "flashinfer.fp4_cudnn"), _ALL),
        "vLLM tries FlashInfer's CUTLASS, then its own; TensorRT-LLM's is ahead up to 32 rows, behind from 64 on "
        "(https://github.com/vllm-project/vllm/pull/42235); FlashInfer prefers cuDNN's on a B200, not on a B300 "
        "(https://github.com/flashinfer-ai/flashinfer/pull/2404)",
        expected=True,
    ),
    Line(
        "blackwell_rtx",
        "*",
        first(("cutlass.vllm_fp4",), _ALL),
        "CUTLASS's is vLLM's own for sm_120 (https://github.com/vllm-project/vllm/pull/21309)",
        expected=True,
    ),
    *(
        Line(
            family,
            "*",
            first(_MARLIN, _ALL),
            "Marlin was made for sm_80, and is what vLLM and SGLang run there "
            "(https://github.com/sgl-project/sglang/pull/19652)",
            expected=True,
        )
        for family in ("ampere", "ada")
    ),
)

ORDER = {
    "fp4_gemm": FP4_GEMM,
}
