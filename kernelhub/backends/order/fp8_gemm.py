"""Order of the kernels of `fp8_gemm`."""

from kernelhub.dispatch.order import Line

_TRITON = "triton.fp8_gemm"
_LAST = "torch.dequantized"

LINES = (
    # 4096 x 4096 weights in blocks, 1, 16 and 256 rows, on two cores: 0.58, 1.51, 12.6 ms; dequantized 5.2, 9.3, 50.
    Line("cpu", "*", ("cpp.fp8_gemm", _LAST, _TRITON), "measured on an EPYC of Zen 5, torch 2.13, 2026-11-20"),
    Line("*", "tensor", ("torch.scaled_mm", _TRITON, _LAST), "not measured yet; cuBLASLt is NVIDIA's own product"),
    Line(
        "*",
        "row",
        ("torch.scaled_mm_rowwise", _TRITON, _LAST),
        "not measured yet; CUTLASS's product, tuned for each of the generations that torch takes it on",
    ),
    Line("*", "block", (_TRITON, _LAST), "not measured yet; the other makes float32 of all weights first"),
    Line("*", "mx", (_TRITON, _LAST), "not measured yet; the other makes float32 of all weights first"),
)
