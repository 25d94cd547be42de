"""Order of the kernels of `grouped_gemm`."""

from kernelhub.dispatch.order import Line

_H200 = "measured on an H200, the only GPU so far (benchmarks/results/grouped_gemm_h200.json)"
_SCALED = "torch.scaled_grouped_mm"

LINES = (
    Line("cpu", "*", ("torch.per_group", "triton.grouped"), "Triton is only interpreted on a CPU"),
    # 8 and 2 rows a group: 0.204 and 0.420 ms against torch's 0.266 and 0.503; 256 and 128: 0.606 and 0.842 against
    # 0.452 and 0.794.
    Line("*", "decode", ("triton.grouped", "torch.grouped_mm", _SCALED, "torch.per_group"), _H200),
    # float8 scaled by row, which torch's scaled_grouped_mm and ours take: 128 groups of 256 rows with 1536 x 2048 took
    # 0.64 ms against 0.42; 256 of 128 with 512 x 7168 0.36 against 0.45; 32 of 256 with 4096 x 7168 0.47 against 0.85.
    Line("*", "prefill", ("torch.grouped_mm", "triton.grouped", _SCALED, "torch.per_group"), _H200),
    Line("*", "prefill_long", ("torch.grouped_mm", _SCALED, "triton.grouped", "torch.per_group"), _H200),
)
