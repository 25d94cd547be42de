"""Order of the kernels of `merge_attention_states`."""

from kernelhub.dispatch.order import Line

LINES = (
    Line("cpu", "*", ("torch.merge", "triton.merge"), "Triton is only interpreted on a CPU"),
    Line(
        "*",
        "*",
        ("triton.merge", "torch.merge", "flashinfer.merge"),
        "states are copied for FlashInfer's, with zeros for parts without keys: each is read and written once more",
    ),
)
