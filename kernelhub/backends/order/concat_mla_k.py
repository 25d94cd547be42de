"""Order of the kernels of `concat_mla_k`."""

from kernelhub.dispatch.order import Line

LINES = (Line("cpu", "*", ("torch.concat", "triton.concat"), "Triton is only interpreted on a CPU"),)
