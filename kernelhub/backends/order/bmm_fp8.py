"""Order of the kernels of `bmm_fp8`."""

from kernelhub.dispatch.order import Line

LINES = (
    # 128 x 512 x 128, 16 rows each, on one core: 1.7 ms, 10.4 dequantized.
    Line(
        "cpu",
        "*",
        ("cpp.bmm_fp8", "torch.dequantized", "triton.bmm_fp8"),
        "measured on an EPYC of Zen 5, torch 2.13, 2026-11-20",
    ),
    Line("*", "*", ("triton.bmm_fp8", "torch.dequantized"), "not measured yet; the other makes float32 of all first"),
)
