"""Order of the kernels of `fp4_gemm`."""

from kernelhub.dispatch.order import Line

_NOT_RUN = ("cutlass.vllm_fp4", *(f"flashinfer.fp4_{name}" for name in ("cutlass", "trtllm", "cudnn")))

LINES = (
    Line("cpu", "*", ("torch.dequantized", "triton.fp4_gemm"), "Triton is only interpreted on a CPU"),
    # From 512 rows on the weight is decoded once: 57344 x 8192, 10240 x 8192 and 7168 x 16384 with 4096 rows took 5.93,
    # 0.999 and 1.33 ms against 9.62, 1.70 and 2.42 decoded in registers, 512 rows 0.995, 0.179 and 0.239 against 1.14,
    # 0.235 and 0.310, on an H200; bfloat16 weights 5.03, 0.877 and 1.20 with 4096 rows.
    Line(
        "*",
        "*",
        ("triton.fp4_gemm", *_NOT_RUN, "torch.dequantized"),
        "vLLM's and FlashInfer's have not run here, since no Blackwell was at hand",
    ),
)
