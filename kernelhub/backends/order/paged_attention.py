"""Order of the kernels of `paged_attention`."""

from kernelhub.dispatch.order import Line

_H200 = "measured on an H200, the only GPU so far (benchmarks/results/attention_h200.json)"
_NO_PEER = "torch has no kernel that reads lengths on the device"
_UNMEASURED = "; FlashInfer's are not measured, and plan on the host"
_PLANNED = ("flashinfer.fa3_prefill", "flashinfer.fa2_prefill")

_FA2 = "Dao 2023, section 4: ahead of Triton on an A100; not measured here"
_FA3 = "Triton reaches 75 to 80 % of FlashAttention-3 in published figures of an H100; not measured here yet"
_FA4 = "its authors' figures on a B200: 1605 TFLOP/s, 2.1 to 2.7 times Triton; not measured here"
_UNSPLIT = "called so that they do not split the keys of decode rows, which triton.mixed does; not measured"

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
    # FlashInfer's decode is not measured yet. Those of its kernels that plan on the host stand behind ours: no CUDA
    # graph can hold them, and a call that gives no lengths on the host would wait for the device.
    Line(
        "*",
        "decode",
        (
            "triton.split_kv",
            "triton.split_kv_fixed",
            "flash_attn.fa3",
            "flashinfer.trtllm_gen",
            "flashinfer.xqa",
            "triton.prefill",
            "triton.mixed",
            "flashinfer.fa2_decode_tc",
            "flashinfer.fa2_decode",
            "flashinfer.fa2_prefill",
            "flashinfer.fa3_prefill",
            "flash_attn.fa2",
            "torch.blocked",
        ),
        _H200,
    ),
    Line("*", "prefill", ("triton.prefill", "triton.mixed", *_PLANNED, "torch.blocked"), _NO_PEER + _UNMEASURED),
    Line("*", "mixed", ("triton.mixed", "triton.prefill", *_PLANNED, "torch.blocked"), _NO_PEER + _UNMEASURED),
    Line(
        "hopper",
        "prefill",
        (
            "flash_attn.fa3",
            "flashinfer.fa3_prefill",
            "flash_attn.fa2",
            "flashinfer.fa2_prefill",
            "triton.prefill",
            "triton.mixed",
            "flash_attn.fa4",
            "torch.blocked",
        ),
        _FA3,
    ),
    Line(
        "hopper",
        "mixed",
        (
            "flash_attn.fa3",
            "triton.mixed",
            "triton.prefill",
            "flash_attn.fa2",
            "flash_attn.fa4",
            *_PLANNED,
            "torch.blocked",
        ),
        _FA3,
    ),
    Line(
        "ampere",
        "prefill",
        ("flash_attn.fa2", "flashinfer.fa2_prefill", "triton.prefill", "triton.mixed", "torch.blocked"),
        _FA2,
    ),
    Line("ada", "prefill", ("flash_attn.fa2", "triton.prefill", "triton.mixed", *_PLANNED, "torch.blocked"), _FA2),
    Line("blackwell", "prefill", ("flash_attn.fa4", "triton.prefill", "triton.mixed", "torch.blocked"), _FA4),
    Line("ampere", "mixed", ("triton.mixed", "triton.prefill", "flash_attn.fa2", "torch.blocked"), _UNSPLIT),
    Line("ada", "mixed", ("triton.mixed", "triton.prefill", "flash_attn.fa2", "torch.blocked"), _UNSPLIT),
    Line("blackwell", "mixed", ("triton.mixed", "triton.prefill", "flash_attn.fa4", "torch.blocked"), _UNSPLIT),
)
