"""Order of the kernels of `route_experts`."""

from kernelhub.dispatch.order import Line

LINES = (Line("cpu", "*", ("torch.routing", "triton.routing"), "Triton is only interpreted on a CPU"),)
