"""Order of the kernels of `topk_indices`."""

from kernelhub.dispatch.order import Line

LINES = (
    Line("cpu", "*", ("torch.topk", "triton.search", "triton.radix"), "Triton is only interpreted on a CPU"),
    Line(
        "*",
        "*",
        ("triton.search", "triton.radix", "torch.topk"),
        "H200, k 2048, search / radix / torch.topk alone, unsorted: 64 x 8192 0.024 / 0.053 / 0.069 ms, "
        "1 x 131072 0.053 / 0.053 / 0.071, 64 x 65536 0.078 / 0.239 / 0.119, 4096 x 32768 1.62 / 4.55 / 1.69",
    ),
)
