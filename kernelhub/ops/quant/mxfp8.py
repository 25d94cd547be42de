"""`quantize_mxfp8` and `dequantize_mxfp8`: float8 with a power of two for 32 elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.op import Ask, Backend, Op
from kernelhub.dispatch.publish import publish
from kernelhub.ops.quant import library
from kernelhub.ops.quant.adapter import DequantizeAdapter, QuantizeAdapter
from kernelhub.ops.quant.dequantize_call import bind_dequantize, check_dequantize, dequantize_problem
from kernelhub.ops.quant.mx_plan import DequantizeMxPlan, QuantizeMxPlan
from kernelhub.ops.quant.problem import DequantizeProblem, QuantizeMxProblem
from kernelhub.ops.quant.quantize_mx_call import ROUNDINGS, bind_mx, check_mx, mx_problem
from kernelhub.ops.quant.reference import dequantize_mxfp8_reference, quantize_mxfp8_reference

_quantize_mxfp8: Op[QuantizeMxProblem] = Op(
    Contract(
        name="quantize_mxfp8",
        summary="floats into float8 with a power of two for 32 elements",
        problem=QuantizeMxProblem,
        problem_of=mx_problem,
        adapter=QuantizeAdapter,
        bind=bind_mx("quantize_mxfp8"),
        reference=quantize_mxfp8_reference,
        example="kernelhub.ops.quant.inputs:quantize_inputs",
    )
)
_dequantize_mxfp8: Op[DequantizeProblem] = Op(
    Contract(
        name="dequantize_mxfp8",
        summary="float8 with a power of two for 32 elements back into floats",
        problem=DequantizeProblem,
        problem_of=dequantize_problem,
        adapter=DequantizeAdapter,
        bind=bind_dequantize("dequantize_mxfp8"),
        reference=dequantize_mxfp8_reference,
        example="kernelhub.ops.quant.inputs:quantize_inputs",
    )
)
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


def _prepare_quantize_mxfp8(*args: Any, backend: Backend = None, **kwargs: Any) -> QuantizeMxPlan:
    """Choose once for a tensor like this: arguments as of `quantize_mxfp8`."""
    asked = _quantize_mxfp8.ask(backend, args, kwargs)
    return QuantizeMxPlan(_quantize_mxfp8.bound_for(asked.key, asked.device, backend), quantize_mxfp8)


def _prepare_dequantize_mxfp8(*args: Any, backend: Backend = None, **kwargs: Any) -> DequantizeMxPlan:
    """Choose once for codes like these: arguments as of `dequantize_mxfp8`."""
    asked = _dequantize_mxfp8.ask(backend, args, kwargs)
    return DequantizeMxPlan(_dequantize_mxfp8.bound_for(asked.key, asked.device, backend), dequantize_mxfp8)


@publish(_quantize_mxfp8, _prepare_quantize_mxfp8, traced=library.quantize_mxfp8)
def quantize_mxfp8(
    x: Tensor,
    scale_rounding: str = "floor",
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    backend: Backend = None,
) -> tuple[Tensor, Tensor]:
    """Quantise floats to MXFP8, so that ``x`` is about ``codes * scale``.

    Args:
        x: ``[..., K]``, bfloat16, float16 or float32, of any strides; the last group may be shorter than 32.
        scale_rounding: ``"floor"``, the specification's scale, with which the largest of a group may saturate; or
            ``"up"``, the least power of two with which nothing does.
        out: destination of the codes, float8_e4m3fn ``[..., K]``.
        out_scale: destination of the scales, float8_e8m0fnu ``[..., ceil(K / 32)]``.
        backend: this backend or kernel, or the first of these that can, or an error with all reasons.

    Returns:
        Codes, float8_e4m3fn ``[..., K]``; scales, float8_e8m0fnu ``[..., ceil(K / 32)]``, row
        by row, not swizzled. Zeros, denormals, infinity and NaN have defined results (see `kernelhub.ops.quant`).

    Raises:
        InvalidArgument: an argument breaks this contract; the parameter is named.
        NoKernel: no kernel can run this, with the reason of each.

    Source:
        OCP Microscaling Formats (MX) Specification 1.0, section 6.3; for ``"up"`` Mishra et al. 2025.

    Example:
        >>> import torch, kernelhub
        >>> codes, scale = kernelhub.quantize_mxfp8(torch.randn(4, 64))
        >>> codes.shape, scale.shape
        (torch.Size([4, 64]), torch.Size([4, 2]))
    """
    if type(x) is not Tensor and isinstance(x, Tensor) and not isinstance(backend, Ask):
        return library.quantize_mxfp8(x, scale_rounding, out, out_scale, backend)
    try:
        if scale_rounding not in ROUNDINGS:
            raise ValueError(scale_rounding)
        key = (x.dtype, scale_rounding == "up")
    except (AttributeError, TypeError, ValueError):
        check_mx("quantize_mxfp8", x, scale_rounding)
        raise
    if backend is None and not (_contexts_used and _contexts()):
        run = _quantize_mxfp8.table.get(key)
    else:
        run = _quantize_mxfp8.override(key, backend)
    if run is None:
        check_mx("quantize_mxfp8", x, scale_rounding)
        run = _quantize_mxfp8.decide(key, x.get_device(), backend)
    result: tuple[Tensor, Tensor] = run(x, out, out_scale)
    return result


@publish(_dequantize_mxfp8, _prepare_dequantize_mxfp8, traced=library.dequantize_mxfp8)
def dequantize_mxfp8(
    x: Tensor,
    scale: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """Turn MXFP8 codes and their scales back into floats.

    Args:
        x: codes, float8_e4m3fn ``[..., K]``.
        scale: float8_e8m0fnu ``[..., ceil(K / 32)]``, or its bytes; row by row, not swizzled.
        out_dtype: bfloat16, float16 or float32.
        out: destination ``[..., K]``.
        backend: this backend or kernel, or the first of these that can, or an error with all reasons.

    Returns:
        ``code * scale`` ``[..., K]``, rounded to float32, then to `out_dtype`.

    Raises:
        InvalidArgument: an argument breaks this contract; the parameter is named.
        NoKernel: no kernel can run this, with the reason of each.

    Source:
        OCP Microscaling Formats (MX) Specification 1.0.

    Example:
        >>> import torch, kernelhub
        >>> x = torch.tensor([[0.5, -6.0, 3.0, 0.0] * 8])
        >>> kernelhub.dequantize_mxfp8(*kernelhub.quantize_mxfp8(x)).float().equal(x)
        True
    """
    if type(x) is not Tensor and isinstance(x, Tensor) and not isinstance(backend, Ask):
        return library.dequantize_mxfp8(x, scale, out_dtype, out, backend)
    try:
        key = (out_dtype, x.ndim > 0)
        hash(key)
    except (AttributeError, TypeError):
        check_dequantize("dequantize_mxfp8", x, scale, None, out_dtype)
        raise
    if backend is None and not (_contexts_used and _contexts()):
        run = _dequantize_mxfp8.table.get(key)
    else:
        run = _dequantize_mxfp8.override(key, backend)
    if run is None:
        check_dequantize("dequantize_mxfp8", x, scale, None, out_dtype)
        run = _dequantize_mxfp8.decide(key, x.get_device(), backend)
    result: Tensor = run(x, scale, None, out)
    return result
