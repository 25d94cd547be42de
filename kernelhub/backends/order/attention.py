"""Order of the kernels of `attention`."""

from kernelhub.dispatch.order import Line

_H200 = "benchmarks/results/h200.json (H200, torch 2.11.0, Triton 3.6.0, 2026-11-20; no other GPU was measured)"

LINES = (
    Line(
        "cpu",
        "*",
        ("torch.packed", "torch.sdpa", "torch.blocked", "triton.prefill", "triton.split_kv"),
        "benchmarks/results/cpu.json: packed against sdpa; Triton is only interpreted on a CPU",
    ),
    Line(
        "*",
        "decode",
        ("torch.sdpa", "triton.split_kv", "triton.prefill", "torch.blocked"),
        f"{_H200}: torch takes 0.6 (1 x 8192) to 0.95 (32 x 4096) of the time of triton.split_kv, that 0.2 to 0.9 of "
        "triton.prefill's",
    ),
    Line(
        "*",
        "prefill",
        ("torch.sdpa", "triton.prefill", "torch.blocked"),
        f"{_H200}: torch takes 0.65 to 0.7 of the time of triton.prefill; on an A100 FlashAttention-2, which torch "
        "ships, is ahead of Triton too (Dao 2023, section 4)",
    ),
)
