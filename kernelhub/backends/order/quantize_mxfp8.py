"""Order of the kernels of `quantize_mxfp8`."""

from kernelhub.dispatch.order import Line

LINES = (Line("cpu", "*", ("torch.quantize", "triton.quantize"), "Triton is only interpreted on a CPU"),)
