"""Order of the kernels of `concat_mla_k`."""

from kernelhub.dispatch.order import Line

LINES = (
    Line("cpu", "*", ("torch.concat", "triton.concat"), "Triton is only interpreted on a CPU"),
    # 8192 tokens, 128 heads: 0.170 ms, 0.89 of the roof. Beside FlashInfer 0.6.18: 0.169 and 0.179; 64 tokens 0.006 and
    # 0.009.
    Line(
        "*",
        "*",
        ("triton.concat", "flashinfer.concat", "torch.concat"),
        "measured on an H200, the only GPU so far (benchmarks/results/attention_h200.json)",
    ),
)
