"""Order of the kernels of `bmm_fp8`."""

from kernelhub.dispatch.order import Line

LINES = (
    Line("cpu", "*", ("torch.dequantized", "triton.bmm_fp8"), "Triton is only interpreted on a CPU"),
    Line("*", "*", ("triton.bmm_fp8", "torch.dequantized"), "not measured yet; the other makes float32 of all first"),
)
