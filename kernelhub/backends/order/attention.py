"""Order of the kernels of `attention`."""

from kernelhub.dispatch.order import Line

_H200 = "measured on an H200, the only GPU so far (benchmarks/results/attention_h200.json)"

_FA2 = "Dao 2023, section 4: ahead of Triton on an A100; torch ships the same algorithm; not measured here"
_FA3 = "Shah et al. 2024, section 4: 1.5 to 2 times FlashAttention-2 on an H100; not measured here yet"
_FA4 = "its authors' figures on a B200: 1605 TFLOP/s, 2.1 to 2.7 times Triton; not measured here"

LINES = (
    Line(
        "cpu",
        "*",
        ("torch.packed", "torch.sdpa", "torch.blocked", "triton.prefill", "triton.split_kv"),
        "measured on an EPYC (benchmarks/results/attention_cpu.json)",
    ),
    # 1 x 8192, 32 x 4096, 128 x 2048 tokens: torch 0.022, 0.133, 0.254 ms, split_kv 0.031, 0.135, 0.254.
    Line(
        "*",
        "decode",
        ("torch.sdpa", "triton.split_kv", "flash_attn.fa3", "flash_attn.fa2", "triton.prefill", "torch.blocked"),
        _H200,
    ),
    # torch takes 0.64 to 0.71 of the time of triton.prefill. On an A100 too, FlashAttention-2, which torch ships, is
    # ahead of Triton (Dao 2023, section 4).
    Line("*", "prefill", ("torch.sdpa", "triton.prefill", "torch.blocked"), _H200),
    Line(
        "hopper",
        "prefill",
        ("flash_attn.fa3", "torch.sdpa", "flash_attn.fa2", "triton.prefill", "flash_attn.fa4", "torch.blocked"),
        _FA3,
    ),
    Line("ampere", "prefill", ("torch.sdpa", "flash_attn.fa2", "triton.prefill", "torch.blocked"), _FA2),
    Line("ada", "prefill", ("torch.sdpa", "flash_attn.fa2", "triton.prefill", "torch.blocked"), _FA2),
    Line("blackwell", "prefill", ("torch.sdpa", "flash_attn.fa4", "triton.prefill", "torch.blocked"), _FA4),
)
