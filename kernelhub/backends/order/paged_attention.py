"""Order of the kernels of `paged_attention`."""

from kernelhub.dispatch.order import Line

LINES = (
    Line(
        "cpu",
        "*",
        ("torch.packed", "torch.blocked"),
        "measured: bf16 decode over gathered pages 5 times blocked (EPYC, 2 cores, torch 2.13)",
    ),
)
