"""Order of the kernels of `fp4_gemm`."""

from kernelhub.dispatch.order import Line

LINES = (Line("cpu", "*", ("torch.dequantized", "triton.fp4_gemm"), "Triton is only interpreted on a CPU"),)
