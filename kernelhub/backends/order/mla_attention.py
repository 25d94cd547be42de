"""Order of the kernels of `mla_attention`."""

from kernelhub.dispatch.order import Line

LINES = (
    Line(
        "cpu",
        "*",
        ("torch.gathered", "triton.split_kv", "triton.split_kv_fixed"),
        "Triton is only interpreted on a CPU",
    ),
    # 32 sequences of 8192 tokens, 128 heads: 0.348, 0.423 and 12.7 ms. torch.gathered copies the rows of each sequence
    # before it reads them, and waits for the lengths.
    Line(
        "*",
        "*",
        ("triton.split_kv", "triton.split_kv_fixed", "torch.gathered"),
        "measured on an H200, the only GPU so far (benchmarks/results/mla_h200.json)",
    ),
)
