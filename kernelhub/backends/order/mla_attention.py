"""Order of the kernels of `mla_attention`."""

from kernelhub.dispatch.order import Line

LINES = (
    Line(
        "cpu",
        "*",
        ("torch.gathered", "triton.split_kv", "triton.split_kv_fixed"),
        "Triton is only interpreted on a CPU",
    ),
    # Not measured yet. torch.gathered copies the rows of each sequence before it reads them, and waits for the lengths;
    # fixed splits leave multiprocessors idle where the batch is small, and make needless parts where it is not.
    Line(
        "*",
        "*",
        ("triton.split_kv", "triton.split_kv_fixed", "torch.gathered"),
        "by what they read and write; only the first fits its splits to the device",
    ),
)
