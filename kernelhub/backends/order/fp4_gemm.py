"""Order of the kernels of `fp4_gemm`."""

from kernelhub.dispatch.order import Line

LINES = (
    Line("cpu", "*", ("torch.dequantized", "triton.fp4_gemm"), "Triton is only interpreted on a CPU"),
    Line(
        "*",
        "*",
        ("triton.fp4_gemm", "cutlass.vllm_fp4", "torch.dequantized"),
        "CUTLASS in vLLM's library has not run here, since no Blackwell was at hand: behind what has run",
    ),
)
