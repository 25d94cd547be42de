"""Order of the kernels of `paged_attention`."""

from kernelhub.dispatch.order import Line

_H200 = "benchmarks/results/h200.json (H200, torch 2.11.0, Triton 3.6.0, 2026-11-20; no other GPU was measured)"
_NO_PEER = "only kernels that read lengths on the device serve a step without a sync; torch.blocked syncs"

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
        "benchmarks/results/cpu.json: packed against blocked; Triton is only interpreted on a CPU",
    ),
    Line(
        "*",
        "decode",
        ("triton.split_kv", "triton.split_kv_fixed", "triton.prefill", "triton.mixed", "torch.blocked"),
        f"{_H200}: split_kv reaches 0.88 of the memory roof for 64 x 4096 tokens, split_kv_fixed 0.78; 0.147 against "
        "0.211 ms for 1 x 131072; the other way round for 1 x 8192, 0.033 against 0.027 ms",
    ),
    Line("*", "prefill", ("triton.prefill", "triton.mixed", "torch.blocked"), _NO_PEER),
    Line("*", "mixed", ("triton.mixed", "triton.prefill", "torch.blocked"), _NO_PEER),
)
