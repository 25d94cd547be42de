"""Order of the kernels of `write_mla_cache`."""

from kernelhub.dispatch.order import Line

LINES = (Line("cpu", "*", ("torch.scatter", "triton.write"), "Triton is only interpreted on a CPU"),)
