"""Order of the kernels of `paged_attention`."""

from kernelhub.dispatch.order import Line

_H200 = "measured on an H200, the only GPU so far (benchmarks/results/attention_h200.json)"
_NO_PEER = "torch has no kernel that reads lengths on the device"
_FA3 = "FlashAttention-3 is right on an H200, and takes 0.57 to 0.6 of triton.prefill's time for dense prefill there"
# These keep the op's contract against a model of their library; they have not run on a GPU here yet.
_NOT_RUN = (
    "flashinfer.trtllm_gen",
    "flashinfer.xqa",
    "flashinfer.fa2_decode_tc",
    "flashinfer.fa2_decode",
    "flashinfer.fa3_prefill",
    "flashinfer.fa2_prefill",
    "flash_attn.vllm_fa3",
    "flash_attn.fa2",
    "flash_attn.vllm_fa2",
    "flash_attn.fa4",
)

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
    # flash_attn.fa3: 16 x 4096 0.083 ms against 0.085, 64 x 4096 0.270 against 0.261, 256 x 2048 0.536 against 0.507.
    Line(
        "*",
        "decode",
        (
            "triton.split_kv",
            "triton.split_kv_fixed",
            "flash_attn.fa3",
            "triton.prefill",
            "triton.mixed",
            *_NOT_RUN,
            "torch.blocked",
        ),
        _H200,
    ),
    Line("*", "prefill", ("triton.prefill", "triton.mixed", *_NOT_RUN, "torch.blocked"), _NO_PEER),
    Line("*", "mixed", ("triton.mixed", "triton.prefill", *_NOT_RUN, "torch.blocked"), _NO_PEER),
    Line("hopper", "prefill", ("flash_attn.fa3", "triton.prefill", "triton.mixed", *_NOT_RUN, "torch.blocked"), _FA3),
    Line("hopper", "mixed", ("flash_attn.fa3", "triton.mixed", "triton.prefill", *_NOT_RUN, "torch.blocked"), _FA3),
)
