"""Order of the kernels of `fp4_gemm`."""

from kernelhub.dispatch.order import Line

LINES = (
    Line("cpu", "*", ("torch.dequantized", "triton.fp4_gemm"), "Triton is only interpreted on a CPU"),
    Line(
        "*",
        "*",
        ("triton.fp4_gemm", "flashinfer.fp4_cutlass", "torch.dequantized"),
        "FlashInfer's has not run yet: it is for sm_10x, of which none was at hand",
    ),
)
