"""Order of the kernels of `merge_attention_states`."""

from kernelhub.dispatch.order import Line

LINES = (
    Line("cpu", "*", ("torch.merge", "triton.merge"), "Triton is only interpreted on a CPU"),
    # 2 tensors of 8192 tokens, 128 heads of 128: 0.221, 0.980 and 2.71 ms.
    Line(
        "*",
        "*",
        ("triton.merge", "flashinfer.merge", "torch.merge"),  # states are copied for FlashInfer's
        "measured on an H200 (benchmarks/results/timed_with_libraries_h200.json)",
    ),
)
