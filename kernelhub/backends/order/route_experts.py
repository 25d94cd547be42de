"""Order of the kernels of `route_experts`."""

from kernelhub.dispatch.order import Line

_H200 = "measured on an H200, the only GPU so far (benchmarks/results/moe_h200.json)"

LINES = (
    Line("cpu", "*", ("torch.routing", "triton.routing"), "Triton is only interpreted on a CPU"),
    # DeepSeek V3.2's, 4096 tokens: 0.024 and 0.512 ms.
    Line("*", "*", ("triton.routing", "torch.routing"), _H200),
)
