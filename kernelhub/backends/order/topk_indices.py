"""Order of the kernels of `topk_indices`."""

from kernelhub.dispatch.order import Line

LINES = (Line("cpu", "*", ("torch.topk", "triton.radix"), "Triton is only interpreted on a CPU"),)
