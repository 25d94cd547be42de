"""Order of the kernels of `paged_attention`."""

from kernelhub.dispatch.order import Line

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
        "Flash-Decoding (Dao et al. 2023): one query leaves most multiprocessors idle unless keys are split",
    ),
    Line("*", "prefill", ("triton.prefill", "triton.mixed", "torch.blocked"), _NO_PEER),
    Line("*", "mixed", ("triton.mixed", "triton.prefill", "torch.blocked"), _NO_PEER),
)
