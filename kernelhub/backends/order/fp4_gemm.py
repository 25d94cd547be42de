"""Order of the kernels of `fp4_gemm`."""

from kernelhub.dispatch.order import Line

_NOT_RUN = ("cutlass.vllm_fp4", *(f"flashinfer.fp4_{name}" for name in ("cutlass", "trtllm", "cudnn")))

LINES = (
    Line("cpu", "*", ("torch.dequantized", "triton.fp4_gemm"), "Triton is only interpreted on a CPU"),
    Line(
        "*",
        "*",
        ("triton.fp4_gemm", *_NOT_RUN, "torch.dequantized"),
        "vLLM's and FlashInfer's have not run here, since no Blackwell was at hand",
    ),
)
