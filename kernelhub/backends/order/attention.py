"""Order of the kernels of `attention`."""

from kernelhub.dispatch.order import Line

_H200 = "measured on an H200, the only GPU so far (benchmarks/results/attention_h200.json)"
# These keep the op's contract against a model of their library; they have not run on a GPU here yet.
_NOT_RUN = (
    "flash_attn.vllm_fa3",
    "flash_attn.fa2",
    "flash_attn.vllm_fa2",
    "flash_attn.fa4",
    "flashinfer.fa3_ragged",
    "flashinfer.fa2_ragged",
    "torch.varlen_attn",
    "xformers.flash",
    "xformers.cutlass",
)


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
        (
            "torch.sdpa",
            "triton.split_kv",
            "flash_attn.fa3",
            "triton.prefill",
            "cudnn.sdpa",
            *_NOT_RUN,
            "torch.blocked",
        ),
        _H200,
    ),
    # torch takes 0.64 to 0.71 of the time of triton.prefill. On an A100 too, FlashAttention-2, which torch ships, is
    # ahead of Triton (Dao 2023, section 4).
    Line("*", "prefill", ("torch.sdpa", "triton.prefill", *_NOT_RUN, "torch.blocked"), _H200),
    # Llama 3.1 8B, 16 x 1024, 4 x 4096 and 1 x 16384 tokens, flash_attn.fa3, torch.sdpa, triton.prefill: 0.263, 0.294,
    # 0.442 ms; 0.794, 0.976, 1.35; 2.92, 3.59, 4.98. cudnn.sdpa, triton.prefill and torch.sdpa: 1 x 8192 tokens 1.00,
    # 1.31 and 0.95 ms; ragged, 8000 tokens of 4 sequences, 0.417 and 0.510; 128 heads of 192 and 128, 4096 tokens 1.35
    # and 1.79.
    Line(
        "hopper",
        "prefill",
        (
            "flash_attn.fa3",
            "torch.sdpa",
            "cudnn.sdpa",
            "triton.prefill",
            *_NOT_RUN,
            "torch.blocked",
        ),
        _H200,
    ),
)
