"""Order of the kernels of `attention`."""

from kernelhub.dispatch.order import Line

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
        ("triton.split_kv", "triton.prefill", "torch.sdpa", "torch.blocked"),
        "Flash-Decoding (Dao et al. 2023): one query leaves most multiprocessors idle unless keys are split",
    ),
    Line(
        "*",
        "prefill",
        ("torch.sdpa", "triton.prefill", "torch.blocked"),
        "benchmarks/results/h200.json: torch's kernels take 0.6 to 0.8 of Triton's time; so does FlashAttention-2's "
        "paper (Dao 2023, section 4) find on an A100",
    ),
)
