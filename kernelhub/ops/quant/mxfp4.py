"""`quantize_mxfp4` and `dequantize_mxfp4`: float4 with a power of two for 32 elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.op import Ask, Backend
from kernelhub.dispatch.publish import publish
from kernelhub.ops.call_plan import prepares
from kernelhub.ops.formats import E8M0
from kernelhub.ops.operators import Traced
from kernelhub.ops.quant.arguments import dequantized_fp4
from kernelhub.ops.quant.dequantize_call import check_dequantize
from kernelhub.ops.quant.mx import DequantizeMxPlan, QuantizeMxPlan, dequantizer, quantizer
from kernelhub.ops.quant.problem import DEQUANTIZE_MXFP4, MX_GROUP, QUANTIZE_MXFP4
from kernelhub.ops.quant.quantize_mx_call import ROUNDINGS, check_mx
from kernelhub.ops.quant.reference import dequantize_mxfp4_reference, quantize_mxfp4_reference

_quantize = quantizer(QUANTIZE_MXFP4, quantize_mxfp4_reference)
_dequantize = dequantizer(DEQUANTIZE_MXFP4, dequantize_mxfp4_reference)
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


def _memory(x: Tensor, **others: Any) -> dict[str, Tensor]:
    *lead, width = x.shape
    codes = x.new_empty((*lead, width // 2), dtype=torch.uint8)
    return {"out": codes, "out_scale": x.new_empty((*lead, -(-width // MX_GROUP)), dtype=E8M0)}


@publish(_quantize, prepares(_quantize, QuantizeMxPlan), traced=Traced(_memory, ("out", "out_scale")))
def quantize_mxfp4(
    x: Tensor,
    scale_rounding: str = "floor",
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    backend: Backend = None,
) -> tuple[Tensor, Tensor]:
    """Quantise floats to MXFP4, so that ``x`` is about ``codes * scale``.

    Args:
        x: ``[..., K]``, bfloat16, float16 or float32, of any strides; K is a multiple of 32.
        scale_rounding: ``"floor"``, the specification's scale, with which the largest of a group may saturate; or
            ``"up"``, the least power of two with which nothing does.
        out: destination of the codes, uint8 ``[..., K / 2]``.
        out_scale: destination of the scales, float8_e8m0fnu ``[..., K / 32]``.
        backend: this backend or kernel, or the first of these that can, or an error with all reasons.

    Returns:
        Codes, uint8 ``[..., K / 2]``, the first of two in the low four bits; scales, float8_e8m0fnu ``[..., K / 32]``,
        row by row, not swizzled. Zeros, denormals, infinity and NaN have defined results (see `kernelhub.ops.quant`).

    Raises:
        InvalidArgument: an argument breaks this contract; the parameter is named.
        NoKernel: no kernel can run this, with the reason of each.

    Source:
        OCP Microscaling Formats (MX) Specification 1.0, section 6.3; for ``"up"`` Mishra et al. 2025.

    Example:
        >>> import torch, kernelhub
        >>> codes, scale = kernelhub.quantize_mxfp4(torch.randn(4, 64))
        >>> codes.shape, scale.shape
        (torch.Size([4, 32]), torch.Size([4, 2]))
    """
    if type(x) is not Tensor and isinstance(x, Tensor) and not isinstance(backend, Ask):
        traced: tuple[Tensor, Tensor] = _quantize.traced(**locals())
        return traced
    try:
        if scale_rounding not in ROUNDINGS:
            raise ValueError(scale_rounding)
        key = (x.dtype, scale_rounding == "up")
    except (AttributeError, TypeError, ValueError, RuntimeError):
        check_mx("quantize_mxfp4", x, scale_rounding)
        raise
    if backend is None and not (_contexts_used and _contexts()):
        run = _quantize.table.get(key)
    else:
        run = _quantize.override(key, backend)
    if run is None:
        check_mx("quantize_mxfp4", x, scale_rounding)
        run = _quantize.decide(key, x.get_device(), backend)
    result: tuple[Tensor, Tensor] = run(x, out, out_scale)
    return result


@publish(_dequantize, prepares(_dequantize, DequantizeMxPlan), traced=Traced(dequantized_fp4))
def dequantize_mxfp4(
    x: Tensor,
    scale: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """Turn MXFP4 codes and their scales back into floats.

    Args:
        x: codes, uint8 or float4_e2m1fn_x2 ``[..., K / 2]``, the first of two in the low four bits.
        scale: float8_e8m0fnu ``[..., K / 32]``, or its bytes; row by row, not swizzled.
        out_dtype: bfloat16, float16 or float32.
        out: destination ``[..., K]``.
        backend: this backend or kernel, or the first of these that can, or an error with all reasons.

    Returns:
        ``code * scale`` ``[..., K]``, rounded to float32, then to `out_dtype`.

    Raises:
        InvalidArgument: an argument breaks this contract; the parameter is named.
        NoKernel: no kernel can run this, with the reason of each.

    Source:
        OCP Microscaling Formats (MX) Specification 1.0; the experts of gpt-oss.

    Example:
        >>> import torch, kernelhub
        >>> x = torch.tensor([[0.5, -6.0, 3.0, 0.0] * 8])
        >>> kernelhub.dequantize_mxfp4(*kernelhub.quantize_mxfp4(x)).float().equal(x)
        True
    """
    if type(x) is not Tensor and isinstance(x, Tensor) and not isinstance(backend, Ask):
        traced: Tensor = _dequantize.traced(**locals())
        return traced
    try:
        key = (out_dtype, x.ndim > 0)
        hash(key)
    except (AttributeError, TypeError, RuntimeError):
        check_dequantize("dequantize_mxfp4", x, scale, None, out_dtype)
        raise
    if backend is None and not (_contexts_used and _contexts()):
        run = _dequantize.table.get(key)
    else:
        run = _dequantize.override(key, backend)
    if run is None:
        check_dequantize("dequantize_mxfp4", x, scale, None, out_dtype)
        run = _dequantize.decide(key, x.get_device(), backend)
    result: Tensor = run(x, scale, None, out)
    return result
