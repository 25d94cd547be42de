"""Order of the kernels of `quantize_nvfp4`."""

from kernelhub.dispatch.order import Line

LINES = (
    Line("cpu", "*", ("torch.quantize", "triton.quantize"), "Triton is only interpreted on a CPU"),
    Line(
        "*",
        "*",
        ("triton.quantize", "torch.quantize", "flashinfer.quantize_nvfp4", "flashinfer.quantize_nvfp4_kv"),
        "FlashInfer's do not give the bits of the op, and are run for who says unsafe=True alone",
    ),
)
