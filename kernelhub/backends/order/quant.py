"""Order of the kernels of quantisation."""

from kernelhub.dispatch.order import Line

_OWN_BITS = "the bits of FlashInfer's kernel differ from those of the op, so it requires unsafe=True"
_INTERPRETED = "Triton is only interpreted on a CPU"
_QUANTIZE = Line("cpu", "*", ("torch.quantize", "triton.quantize"), _INTERPRETED)
_DEQUANTIZE = Line("cpu", "*", ("torch.dequantize", "triton.dequantize"), _INTERPRETED)

# H200, in a graph, us, caches cold, triton.quantize / cuda.quantize, groups of 128, 7168 wide: 8 rows 2.06 / 1.77, 128
# 3.43 / 3.10, 1024 10.2 / 9.6, 8192 57 / 52. By token Triton's is faster: 8 rows 2.21 / 2.66, 8192 53 / 56.
_GROUPS_ON_HOPPER = Line(
    "hopper",
    "groups",
    ("cuda.quantize", "triton.quantize", "torch.quantize", "flashinfer.quantize_fp8"),
    "measured on an H200, torch 2.11.0, Triton 3.6.0, 2026-11-27 (benchmarks/results/small_ops_h200.json); "
    + _OWN_BITS,
)

ORDER = {
    **{
        f"quantize_{form}": (
            _QUANTIZE,
            Line("*", "*", ("triton.quantize", "torch.quantize", f"flashinfer.quantize_{form}"), _OWN_BITS),
            *((_GROUPS_ON_HOPPER,) if form == "fp8" else ()),
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
