"""Order of the kernels of quantisation."""

from kernelhub.dispatch.order import Line

_OWN_BITS = "the bits of FlashInfer's kernel differ from those of the op, so it requires unsafe=True"
_INTERPRETED = "Triton is only interpreted on a CPU"
_QUANTIZE = Line("cpu", "*", ("torch.quantize", "triton.quantize"), _INTERPRETED)
_DEQUANTIZE = Line("cpu", "*", ("torch.dequantize", "triton.dequantize"), _INTERPRETED)

# H200, in a graph, us, triton.quantize / cuda.quantize, 7168 wide, 8, 128, 1024 and 8192 rows: groups of 128 1.96 /
# 1.18, 3.05 / 2.67, 9.80 / 7.44, 58.2 / 46.9, by token 2.07 / 1.46, 3.21 / 2.63, 9.36 / 7.79, 54.3 / 47.4.
_FP8_ON_HOPPER = Line(
    "hopper",
    "*",
    ("cuda.quantize", "triton.quantize", "torch.quantize", "flashinfer.quantize_fp8"),
    "measured on an H200, torch 2.11.0, Triton 3.6.0, 2026-11-27 (benchmarks/results/small_ops_forms_h200.json); "
    + _OWN_BITS,
)

ORDER = {
    **{
        f"quantize_{form}": (
            _QUANTIZE,
            Line("*", "*", ("triton.quantize", "torch.quantize", f"flashinfer.quantize_{form}"), _OWN_BITS),
            *((_FP8_ON_HOPPER,) if form == "fp8" else ()),
        )
        for form in ("fp8", "mxfp8", "mxfp4")
    },
    "quantize_nvfp4": (
        _QUANTIZE,
        Line(
            "*",
            "*",
            ("triton.quantize", "torch.quantize", "flashinfer.quantize_nvfp4", "flashinfer.quantize_nvfp4_kv"),
            "the bits of FlashInfer's kernels differ from those of the op, so they require unsafe=True",
        ),
    ),
    **{f"dequantize_{form}": (_DEQUANTIZE,) for form in ("fp8", "mxfp8", "mxfp4")},
    "dequantize_nvfp4": (
        _DEQUANTIZE,
        Line(
            "*",
            "*",
            ("triton.dequantize", "flashinfer.dequantize", "torch.dequantize"),
            "FlashInfer's gives the same bits on an H200, and has not been timed",
        ),
    ),
}
