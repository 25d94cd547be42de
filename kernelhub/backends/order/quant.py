"""Order of the kernels of quantisation."""

from kernelhub.dispatch.order import Line

_OWN_BITS = "the bits of FlashInfer's kernel differ from those of the op, so it requires unsafe=True"
_INTERPRETED = "Triton is only interpreted on a CPU"
_QUANTIZE = Line("cpu", "*", ("torch.quantize", "triton.quantize"), _INTERPRETED)
_DEQUANTIZE = Line("cpu", "*", ("torch.dequantize", "triton.dequantize"), _INTERPRETED)

ORDER = {
    **{
        f"quantize_{form}": (
            _QUANTIZE,
            Line("*", "*", ("triton.quantize", "torch.quantize", f"flashinfer.quantize_{form}"), _OWN_BITS),
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
