"""Order of the kernels of `mla_attention`."""

from kernelhub.dispatch.order import Line

_PLANNED = ("flashinfer.mla_fa3", "flashinfer.mla_fa2")

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
        ("triton.split_kv", "triton.split_kv_fixed", *_PLANNED, "torch.gathered"),
        "measured on an H200, the only GPU so far (benchmarks/results/mla_h200.json); FlashInfer's are not, and stand "
        "in no CUDA graph",
    ),
    # The decode above is bound by multiplication: 73 GFLOP in 0.348 ms are 0.27 of what an H200 multiplies.
    Line(
        "hopper",
        "prefill",
        (*_PLANNED, "triton.split_kv", "triton.split_kv_fixed", "torch.gathered"),
        "flashinfer.mla_fa3 is written for sm_90's own instructions, and triton.split_kv leaves much of them; "
        "not measured here",
    ),
)
