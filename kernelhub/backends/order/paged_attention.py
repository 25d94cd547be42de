"""Order of the kernels of `paged_attention`."""

from kernelhub.dispatch.order import Line

_H200 = "measured on an H200, the only GPU so far (benchmarks/results/attention_h200.json)"
_NO_PEER = "torch has no kernel that reads lengths on the device"
_UNMEASURED = "; FlashInfer's are not measured, and plan on the host"
_PLANNED = ("flashinfer.fa3_prefill", "flashinfer.fa2_prefill")

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
            "flashinfer.trtllm_gen",
            "flashinfer.xqa",
            "triton.prefill",
            "triton.mixed",
            "flashinfer.fa2_decode_tc",
            "flashinfer.fa2_decode",
            "flashinfer.fa2_prefill",
            "flashinfer.fa3_prefill",
            "torch.blocked",
        ),
        _H200,
    ),
    Line(
        "ampere",
        "prefill",
        ("flashinfer.fa2_prefill", "triton.prefill", "triton.mixed", "torch.blocked"),
        "FlashAttention-2 is ahead of Triton on an A100 (Dao 2023, section 4); not measured here",
    ),
    Line(
        "hopper",
        "prefill",
        ("flashinfer.fa3_prefill", "flashinfer.fa2_prefill", "triton.prefill", "triton.mixed", "torch.blocked"),
        "FlashAttention-3 is 1.5 to 2 times as fast as FlashAttention-2 on an H100 (Shah et al. 2024), and torch's "
        "took 0.64 to 0.71 of the time of triton.prefill on an H200; not measured here",
    ),
    Line("*", "prefill", ("triton.prefill", "triton.mixed", *_PLANNED, "torch.blocked"), _NO_PEER + _UNMEASURED),
    Line("*", "mixed", ("triton.mixed", "triton.prefill", *_PLANNED, "torch.blocked"), _NO_PEER + _UNMEASURED),
)
