"""Order of the kernels of `attention`."""

from kernelhub.dispatch.order import Line

_H200 = "measured on an H200, the only GPU so far (benchmarks/results/attention_h200.json)"
_PLANNED = ("flashinfer.fa3_ragged", "flashinfer.fa2_ragged")

LINES = (
    Line(
        "cpu",
        "*",
        ("torch.packed", "torch.sdpa", "torch.blocked", "triton.prefill", "triton.split_kv"),
        "measured on an EPYC (benchmarks/results/attention_cpu.json)",
    ),
    # 1 x 8192, 32 x 4096, 128 x 2048 tokens: torch 0.022, 0.133, 0.254 ms, split_kv 0.031, 0.135, 0.254.
    Line("*", "decode", ("torch.sdpa", "triton.split_kv", "triton.prefill", *_PLANNED, "torch.blocked"), _H200),
    # torch takes 0.64 to 0.71 of the time of triton.prefill. On an A100 too, FlashAttention-2, which torch ships, is
    # ahead of Triton (Dao 2023, section 4).
    Line("*", "prefill", ("torch.sdpa", "triton.prefill", *_PLANNED, "torch.blocked"), _H200),
    # torch.sdpa takes no packed sequences; FlashInfer's kernels do, and are of the same two papers.
    Line(
        "ampere",
        "prefill",
        ("torch.sdpa", "flashinfer.fa2_ragged", "triton.prefill", "torch.blocked"),
        "FlashAttention-2 is ahead of Triton on an A100 (Dao 2023, section 4); FlashInfer is not measured here",
    ),
    Line(
        "hopper",
        "prefill",
        ("torch.sdpa", *_PLANNED, "triton.prefill", "torch.blocked"),
        _H200
        + "; of FlashInfer's, FlashAttention-3 is 1.5 to 2 times as fast as FlashAttention-2 on an H100 (Shah et al. "
        "2024), which torch has; not measured here",
    ),
)
