"""Order of the kernels of `rms_norm_quant` and `silu_and_mul_quant`."""

from kernelhub.dispatch.order import Line

_CPU = Line("cpu", "*", ("torch.steps", "triton.rows"), "Triton is only interpreted on a CPU")
_GPU = Line(
    "*",
    "*",
    ("triton.rows", "cuda.rows", "torch.steps"),
    "not timed; torch writes and reads each step's result, the others the row alone",
)

ORDER = {"rms_norm_quant": (_CPU, _GPU), "silu_and_mul_quant": (_CPU, _GPU)}
