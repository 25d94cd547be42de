"""Order of the kernels of `attention`."""

from kernelhub.dispatch.order import Line

_FA2 = "FlashAttention-2 paper (Dao 2023), section 4: its CUDA kernel, which torch ships, is 1.3 to 2.5 times Triton's"

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
        ("triton.prefill", "torch.sdpa", "torch.blocked"),
        "FlashAttention-3 paper (Shah et al. 2024), figure 5: on H100 Triton is above FlashAttention-2, torch's kernel",
    ),
    Line("ampere", "prefill", ("torch.sdpa", "triton.prefill", "torch.blocked"), _FA2),
    Line("ada", "prefill", ("torch.sdpa", "triton.prefill", "torch.blocked"), _FA2),
)
