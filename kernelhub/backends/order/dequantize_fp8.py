"""Order of the kernels of `dequantize_fp8`."""

from kernelhub.dispatch.order import Line

LINES = (Line("cpu", "*", ("torch.dequantize", "triton.dequantize"), "Triton is only interpreted on a CPU"),)
