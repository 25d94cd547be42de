"""Order of the kernels of quantisation."""

from kernelhub.dispatch.order import Line

_OWN_BITS = "FlashInfer's does not give the bits of the op, and is run for who says unsafe=True alone"
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
            "FlashInfer's do not give the bits of the op, and are run for who says unsafe=True alone",
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
