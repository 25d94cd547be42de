"""Order of the kernels of `mqa_logits`."""

from kernelhub.dispatch.order import Line

LINES = (
    Line("cpu", "*", ("torch.logits", "triton.logits"), "Triton is only interpreted on a CPU"),
    Line(
        "*",
        "*",
        ("deep_gemm.logits", "triton.logits", "torch.logits"),
        "DeepSeek-V3.2 was published with DeepGEMM's; not yet measured against ours",
    ),
)
