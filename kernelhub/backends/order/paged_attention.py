"""Order of the kernels of `paged_attention`."""

from kernelhub.dispatch.order import Line

_H200 = "measured on an H200, the only GPU so far (benchmarks/results/attention_h200.json)"
_NO_PEER = "torch has no kernel that reads lengths on the device"
_FA3 = "FlashAttention-3 is right on an H200, and takes 0.57 to 0.6 of triton.prefill's time for dense prefill there"
# These keep the op's contract against a model of their library; they have not run on a GPU here yet.
_NOT_RUN = (
    "flashinfer.trtllm_gen",
    "flashinfer.trtllm_context",
    "flashinfer.fa3_sinks",
    "flashinfer.fa2_sinks",
    "flash_attn.vllm_fa3",
    "flash_attn.fa2",
    "flash_attn.vllm_fa2",
    "flash_attn.fa4",
)
# FlashInfer 0.6.18 on an H200, 64 heads to 8 of 128, pages of 64 tokens; what its plans cost the host is not in it.
# 64 x 4096: split_kv 0.264 ms, fa2_decode_tc and fa2_prefill 0.262, xqa 0.299; 256 x 1024 0.275, 0.277, 0.302;
# 1 x 131072 0.147, 0.145, 0.155; 32 heads to 32, 32 x 4096: 0.503, fa2_prefill 0.500, fa2_decode 0.538. Four queries
# each, 64 x 4096: split_kv 0.370, fa2_prefill 0.298. So what stands in a full graph and plans nothing goes first.
_FLASHINFER_DECODE = (
    "flashinfer.fa2_decode_tc",
    "flashinfer.fa2_prefill",
    "flashinfer.xqa",
    "flashinfer.fa2_decode",
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
            *_FLASHINFER_DECODE,
            "triton.prefill",
            "triton.mixed",
            "flashinfer.fa3_prefill",
            *_NOT_RUN,
            "torch.blocked",
        ),
        _H200,
    ),
    # On an H200 fa2_prefill takes 0.89 of triton.prefill's time. It plans on the host and is compiled for minutes.
    Line(
        "*",
        "prefill",
        (
            "triton.prefill",
            "triton.mixed",
            "flashinfer.fa2_prefill",
            "flashinfer.fa3_prefill",
            *_NOT_RUN,
            "torch.blocked",
        ),
        _NO_PEER,
    ),
    Line(
        "*",
        "mixed",
        (
            "triton.mixed",
            "triton.prefill",
            "flashinfer.fa2_prefill",
            "flashinfer.fa3_prefill",
            *_NOT_RUN,
            "torch.blocked",
        ),
        _NO_PEER,
    ),
    # 2 x 4096: triton.prefill 1.913 ms, fa2_prefill 1.710, fa3_prefill 1.026; 512 of 8192 tokens of 4 sequences 1.818,
    # 1.613 and 0.925: 0.51 to 0.54 of triton.prefill. flash_attn.fa3, which plans on the device, was not in that run.
    Line(
        "hopper",
        "prefill",
        (
            "flash_attn.fa3",
            "flashinfer.fa3_prefill",
            "flashinfer.fa2_prefill",
            "triton.prefill",
            "triton.mixed",
            *_NOT_RUN,
            "torch.blocked",
        ),
        f"{_FA3}; FlashInfer's 0.51 to 0.54 for paged prefill",
    ),
    # 64 sequences of one query and 2 of 2048: triton.mixed 0.664 ms, fa2_prefill 0.681, triton.prefill 0.790,
    # fa3_prefill 1.398.
    Line(
        "hopper",
        "mixed",
        (
            "flash_attn.fa3",
            "triton.mixed",
            "flashinfer.fa2_prefill",
            "triton.prefill",
            "flashinfer.fa3_prefill",
            *_NOT_RUN,
            "torch.blocked",
        ),
        _FA3,
    ),
)
