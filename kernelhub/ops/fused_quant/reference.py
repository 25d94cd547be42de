"""`rms_norm_quant` and `silu_and_mul_quant` in plain torch, and the steps that kernels of torch share with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.formats import E4M3, E8M0, to_e8m0_up
from kernelhub.ops.fused_quant.problem import FP8_GROUP, FP8_TENSOR, FP8_TOKEN, MXFP8, NVFP4
from kernelhub.ops.quant.problem import GROUP, TOKEN
from kernelhub.ops.quant.reference import clean, e4m3_codes, quantize_fp8_rows, quantize_mx_rows, quantize_nvfp4_rows

GROUP_SIZE = 128


def added(x: Tensor, residual: Tensor | None) -> Tensor:
    """x plus the residual, rounded to x's dtype as the next layers see it."""
    return x if residual is None else (x.float() + residual.float()).to(x.dtype)


def normalised(total: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
    """RMSNorm in float32."""
    wide = total.float()
    inverse = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    factor = weight.float() + 1.0 if unit_offset else weight.float()
    return wide * inverse * factor


def activated(x: Tensor) -> Tensor:
    """SiLU of the first half of each row, times the second, in float32."""
    gate, up = x.float().chunk(2, -1)
    return gate / (1.0 + (-gate).exp()) * up


def limited(y: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 with infinity at the largest finite number of a dtype; NaN stays."""
    largest = torch.finfo(dtype).max
    return y.clamp(-largest, largest)


def quantised(
    y: Tensor, format: str, given_scale: Tensor | None, ue8m0: bool, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Codes and scales of rows [M, K] of float32; no scales where one is given."""
    rows = y.unsqueeze(0)
    if format == FP8_TENSOR:
        assert given_scale is not None
        wide, nan = clean(y)
        return e4m3_codes(wide, nan, given_scale.reshape(())), None
    if format == NVFP4:
        assert given_scale is not None
        codes, scale = quantize_nvfp4_rows(rows, given_scale.reshape(()))
    elif format == MXFP8:
        codes, scale = quantize_mx_rows(rows, False, False)
    else:
        codes, scale = quantize_fp8_rows(rows, TOKEN if format == FP8_TOKEN else GROUP, GROUP_SIZE, ue8m0)
        scale = to_e8m0_up(scale) if scale_dtype == E8M0 else scale
    return codes[0], scale[0]


def _results(y: Tensor, dtype: torch.dtype, format: str | None, given: Tensor | None, options: Any) -> list[Tensor]:
    """The result of rows [..., K], and its scales if it has some."""
    if format is None:
        return [y.to(dtype)]
    *lead, width = y.shape
    ue8m0, scale_dtype = options
    rows = limited(y, dtype).reshape(-1, width)
    if not rows.numel():
        out = rows.new_empty(*lead, width // 2 if format == NVFP4 else width, dtype=torch.uint8)
        groups = {FP8_TOKEN: 1, FP8_GROUP: -(-width // GROUP_SIZE), MXFP8: -(-width // 32), NVFP4: width // 16}
        kind = {MXFP8: E8M0, NVFP4: E4M3}.get(format, scale_dtype)
        scale = given if format == FP8_TENSOR else y.new_empty(*lead, groups[format], dtype=kind)
        return [out if format == NVFP4 else out.view(E4M3), scale] if scale is not None else [out]
    codes, made = quantised(rows, format, given, ue8m0 or scale_dtype == E8M0, scale_dtype)
    scale = given if made is None else made.reshape(*lead, made.shape[-1])
    assert scale is not None
    return [codes.reshape(*lead, codes.shape[-1]), scale]


def rms_norm_quant_reference(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    format: str | None = None,
    scale: Tensor | None = None,
    global_scale: Tensor | None = None,
    ue8m0: bool = False,
    scale_dtype: torch.dtype = torch.float32,
    scale_layout: str = "row",
    unit_offset: bool = False,
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_residual: Tensor | None = None,
) -> Any:
    """`rms_norm_quant`; destinations are ignored, scales are row-major."""
    total = added(x, residual)
    y = normalised(total, weight, eps, unit_offset)
    given = global_scale if format == NVFP4 else scale
    results = _results(y, x.dtype, format, given, (ue8m0, scale_dtype))
    results += [] if residual is None else [total]
    return results[0] if len(results) == 1 else tuple(results)


def silu_and_mul_quant_reference(
    x: Tensor,
    format: str | None = None,
    scale: Tensor | None = None,
    global_scale: Tensor | None = None,
    ue8m0: bool = False,
    scale_dtype: torch.dtype = torch.float32,
    scale_layout: str = "row",
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
) -> Any:
    """`silu_and_mul_quant`; destinations are ignored, scales are row-major."""
    given = global_scale if format == NVFP4 else scale
    results = _results(activated(x), x.dtype, format, given, (ue8m0, scale_dtype))
    return results[0] if len(results) == 1 else tuple(results)
