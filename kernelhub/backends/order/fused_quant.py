"""Order of the kernels of `rms_norm_quant` and `silu_and_mul_quant`."""

from kernelhub.dispatch.order import Line

_CPU = Line("cpu", "*", ("torch.steps", "triton.rows"), "Triton is only interpreted on a CPU")
_GPU = Line(
    "*",
    "*",
    ("triton.rows", "cuda.rows", "torch.steps"),
    "not timed; torch writes and reads each step's result, the others the row alone",
)

_H200 = "measured on an H200, torch 2.11.0, Triton 3.6.0, 2026-11-27 (benchmarks/results/small_ops_forms_h200.json)"
_FIRST = ("cuda.rows", "triton.rows", "torch.steps")
# In a graph, us, triton.rows / cuda.rows, 7168 wide, 8, 128, 1024 and 8192 rows: by group 3.15 / 2.00, 5.33 / 4.55,
# 17.9 / 14.5, 103.8 / 101.9, by token 3.27 / 2.02, 5.25 / 3.94, 18.3 / 15.1, 103.3 / 103.1.
_NORM_ON_HOPPER = Line("hopper", "scales", _FIRST, _H200)
# The same by group, 2048 wide: 1.71 / 1.05, 2.72 / 1.83, 5.58 / 4.34, 26.0 / 22.5; 18432 wide: 2.41 / 1.72, 6.00 /
# 4.51, 27.4 / 25.0, 181.7 / 174.6.
_ACTIVATION_ON_HOPPER = Line("hopper", "scales", _FIRST, _H200)

ORDER = {
    "rms_norm_quant": (_CPU, _NORM_ON_HOPPER, _GPU),
    "silu_and_mul_quant": (_CPU, _ACTIVATION_ON_HOPPER, _GPU),
}
