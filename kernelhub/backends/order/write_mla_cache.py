"""Order of the kernels of `write_mla_cache`."""

from kernelhub.dispatch.order import Line

_H200 = "measured on an H200, the only GPU so far (benchmarks/results/mla_h200.json)"

LINES = (
    Line("cpu", "*", ("torch.scatter", "triton.write"), "Triton is only interpreted on a CPU"),
    # 8192 tokens: 0.010 and 0.145 ms.
    Line("*", "*", ("triton.write", "torch.scatter"), _H200),
)
