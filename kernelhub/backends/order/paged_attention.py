"""Order of the kernels of `paged_attention`."""

from kernelhub.dispatch.order import Line

_H200 = "measured on an H200, the only GPU so far (benchmarks/results/attention_h200.json)"
_NO_PEER = "torch has no kernel that reads lengths on the device"

LINES = (
    Line(
        "cpu",
        "*",
        (
            "torch.packed",
            "torch.blocked",
            "triton.split_kv",
            "triton.split_kv_fixed",
            "triton.mixed",
            "triton.prefill",
        ),
        "measured on an EPYC (benchmarks/results/attention_cpu.json)",
    ),
    # 64 x 4096 tokens: split_kv reaches 0.93 of the memory roof, split_kv_fixed 0.78; 1 x 131072: 0.145 and 0.209 ms.
    Line(
        "*",
        "decode",
        ("triton.split_kv", "triton.split_kv_fixed", "triton.prefill", "triton.mixed", "torch.blocked"),
        _H200,
    ),
    Line("*", "prefill", ("triton.prefill", "triton.mixed", "torch.blocked"), _NO_PEER),
    Line("*", "mixed", ("triton.mixed", "triton.prefill", "torch.blocked"), _NO_PEER),
)
