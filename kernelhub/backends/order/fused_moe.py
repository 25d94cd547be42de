"""Order of the kernels of `fused_moe`."""

from kernelhub.dispatch.order import Line

LINES = (Line("cpu", "*", ("torch.experts", "triton.experts"), "Triton is only interpreted on a CPU"),)
