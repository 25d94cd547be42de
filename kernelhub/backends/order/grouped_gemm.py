"""Order of the kernels of `grouped_gemm`."""

from kernelhub.dispatch.order import Line

LINES = (Line("cpu", "*", ("torch.per_group", "triton.grouped"), "Triton is only interpreted on a CPU"),)
