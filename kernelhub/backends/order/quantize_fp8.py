"""Order of the kernels of `quantize_fp8`."""

from kernelhub.dispatch.order import Line

LINES = (
    Line("cpu", "*", ("torch.quantize", "triton.quantize"), "Triton is only interpreted on a CPU"),
    Line(
        "*",
        "*",
        ("triton.quantize", "torch.quantize", "flashinfer.quantize_fp8"),
        "FlashInfer's does not give the bits of the op, and is run for who says unsafe=True alone",
    ),
)
