"""Order of the kernels of float4 products."""

from kernelhub.dispatch.order import Line, first

_MARLIN = ("marlin.nvfp4_bfloat16", "marlin.nvfp4_float16", "marlin.mxfp4")
# For Blackwell.
_NOT_RUN = ("cutlass.vllm_fp4", *(f"flashinfer.fp4_{name}" for name in ("cutlass", "trtllm", "cudnn")))
_ALL = ("triton.fp4_gemm", *_MARLIN, *_NOT_RUN, "torch.dequantized")

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
