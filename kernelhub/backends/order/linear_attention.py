"""Order of the kernels of `linear_attention`."""

from kernelhub.dispatch.order import Line

LINES = (
    Line(
        "cpu",
        "*",
        ("torch.chunked", "triton.chunked", "triton.recurrent"),
        "Triton is only interpreted on a CPU",
    ),
    Line(
        "*",
        "decode",
        ("triton.recurrent", "triton.chunked", "torch.chunked"),
        "H200, 64 sequences of 64 heads of 128: 0.089 ms, by chunks 0.155; one token needs no product of chunks",
    ),
    Line(
        "*",
        "prefill",
        ("triton.chunked", "triton.recurrent", "torch.chunked"),
        "H200, 1 x 4096 tokens of 64 heads of 128: 0.18 ms by chunks, 5.6 by the recurrence, which waits at each token",
    ),
)
