"""Order of the kernels of `merge_attention_states`."""

from kernelhub.dispatch.order import Line

LINES = (Line("cpu", "*", ("torch.merge", "triton.merge"), "Triton is only interpreted on a CPU"),)
