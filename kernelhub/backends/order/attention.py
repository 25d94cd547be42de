"""Order of the kernels of `attention`."""

from kernelhub.dispatch.order import Line

_H200 = "measured on an H200, the only GPU so far (benchmarks/results/attention_h200.json)"

LINES = (
    Line(
        "cpu",
        "*",
        ("torch.packed", "torch.sdpa", "torch.blocked", "triton.prefill", "triton.split_kv"),
        "measured on an EPYC (benchmarks/results/attention_cpu.json)",
    ),
    # 1 x 8192, 32 x 4096, 128 x 2048 tokens: torch 0.022, 0.133, 0.254 ms, split_kv 0.031, 0.135, 0.254.
    Line("*", "decode", ("torch.sdpa", "triton.split_kv", "triton.prefill", "cudnn.sdpa", "torch.blocked"), _H200),
    # torch takes 0.64 to 0.71 of the time of triton.prefill. On an A100 too, FlashAttention-2, which torch ships, is
    # ahead of Triton (Dao 2023, section 4).
    # 32 heads of 128 over 8, causal, cudnn.sdpa, triton.prefill and torch.sdpa: 1 x 8192 tokens 1.00, 1.31 and 0.95 ms,
    # 4 x 2048 0.287, 0.375 and 0.267; ragged, 8000 tokens of 4 sequences, 0.417 and 0.510; 128 heads of 192 and 128,
    # 4096 tokens 1.35 and 1.79.
    Line("*", "prefill", ("torch.sdpa", "cudnn.sdpa", "triton.prefill", "torch.blocked"), _H200),
)
