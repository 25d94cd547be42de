"""Order of the kernels of `paged_mqa_logits`."""

from kernelhub.dispatch.order import Line

LINES = (Line("cpu", "*", ("torch.logits", "triton.logits"), "Triton is only interpreted on a CPU"),)
