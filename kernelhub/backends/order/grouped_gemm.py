"""Order of the kernels of `grouped_gemm`."""

from kernelhub.dispatch.order import Line

_H200 = "measured on an H200, the only GPU so far (benchmarks/results/grouped_gemm_h200.json)"

LINES = (
    Line("cpu", "*", ("torch.per_group", "triton.grouped"), "Triton is only interpreted on a CPU"),
    # 8 and 2 rows a group: 0.204 and 0.420 ms against torch's 0.266 and 0.503; 256 and 128: 0.606 and 0.842 against
    # 0.452 and 0.794.
    Line("*", "decode", ("triton.grouped", "torch.grouped_mm", "torch.per_group"), _H200),
    Line("*", "prefill", ("torch.grouped_mm", "triton.grouped", "torch.per_group"), _H200),
)
