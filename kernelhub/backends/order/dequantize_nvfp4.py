"""Order of the kernels of `dequantize_nvfp4`."""

from kernelhub.dispatch.order import Line

LINES = (
    Line("cpu", "*", ("torch.dequantize", "triton.dequantize"), "Triton is only interpreted on a CPU"),
    Line(
        "*",
        "*",
        ("triton.dequantize", "flashinfer.dequantize", "torch.dequantize"),
        "FlashInfer's gives the same bits on an H200, and has not been timed",
    ),
)
