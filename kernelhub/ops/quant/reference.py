"""Quantisation in plain torch: the definition that every kernel follows bit for bit.

All of it is float32. Nothing is done in a lower precision, and no step is left out that would round.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernelhub.ops.formats import E2M1_MAX, E4M3, E4M3_MAX, E8M0, from_e2m1, from_e8m0, to_e2m1, to_e4m3, to_e8m0_up
from kernelhub.ops.quant.arguments import fp8_scale_shape
from kernelhub.ops.quant.problem import BLOCK, BLOCK_SIZE, MX_GROUP, NVFP4_GROUP, TENSOR, TOKEN

LEAST_SCALE = 2.0**-126  # the least normal float32: its reciprocal is finite, and a GPU that flushes denormals agrees
LEAST_NVFP4_SCALE = 2.0**-9  # the least e4m3 above 0
LEAST_GLOBAL_SCALE = 2.0**-117  # its product with the least scale is a normal float32
EMAX_E2M1, EMAX_E4M3 = 2, 8


def clean(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32 with infinity at the largest finite number of x's dtype and NaN at 0, and where NaN was."""
    largest = torch.finfo(x.dtype).max
    wide = x.float()
    nan = wide.isnan()
    return wide.clamp(-largest, largest).masked_fill(nan, 0.0), nan


def grouped(x: Tensor, group_size: int) -> Tensor:
    """[..., K] as [..., groups, group_size], the last group filled up with zeros."""
    rest = -x.shape[-1] % group_size
    parts: Tensor = torch.nn.functional.pad(x, (0, rest)).unflatten(-1, (-1, group_size))
    return parts


def fp8_scale(amax: Tensor, ue8m0: bool) -> Tensor:
    """float32 scales of groups of these largest magnitudes."""
    scale = _quotient(amax, E4M3_MAX).clamp(min=LEAST_SCALE)
    return from_e8m0(to_e8m0_up(scale)) if ue8m0 else scale


def mx_scale(amax: Tensor, fp4: bool, round_up: bool) -> Tensor:
    """float8_e8m0fnu scales of groups of these largest magnitudes."""
    if round_up:
        return to_e8m0_up(_quotient(amax, E2M1_MAX if fp4 else E4M3_MAX))
    exponent = (amax.view(torch.int32) >> 23) - (EMAX_E2M1 if fp4 else EMAX_E4M3)
    return exponent.clamp(min=0).to(torch.uint8).view(E8M0)


def nvfp4_scale(amax: Tensor, global_scale: Tensor) -> Tensor:
    """float8_e4m3fn scales of groups of these largest magnitudes."""
    wanted = _quotient(amax, E2M1_MAX) / global_scale
    return to_e4m3(torch.where(wanted > LEAST_NVFP4_SCALE, wanted, LEAST_NVFP4_SCALE))


def global_scale_of(amax: Tensor) -> Tensor:
    """The global scale of a tensor of this largest magnitude, with which the largest scale is 448."""
    return _quotient(amax, E4M3_MAX * E2M1_MAX).clamp(min=LEAST_GLOBAL_SCALE)


def _quotient(amax: Tensor, largest: float) -> Tensor:
    """Rounded once. By a number torch does not divide on CUDA, but multiplies with its reciprocal."""
    return amax / torch.full((), largest, device=amax.device, dtype=torch.float32)


def e4m3_codes(x: Tensor, nan: Tensor, scale: Tensor) -> Tensor:
    """float8_e4m3fn of x / scale; NaN is 0x7f."""
    quotient = x / scale
    codes = to_e4m3(quotient).view(torch.uint8)
    return codes.masked_fill(nan | quotient.isnan(), 0x7F).view(E4M3)


def e2m1_codes(x: Tensor, lost: Tensor, scale: Tensor) -> Tensor:
    """Packed float4 of x / scale, 0 in `lost` groups and where that is NaN."""
    quotient = x / scale
    return to_e2m1(quotient.masked_fill(lost | quotient.isnan(), 0.0))


def quantize_fp8_rows(x: Tensor, granularity: str, group_size: int, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """[B, M, K] to float8_e4m3fn [B, M, K] and float32 scales [B, R, C]."""
    wide, nan = clean(x)
    size = wide.abs()
    if granularity == TENSOR:
        scale = fp8_scale(size.amax().view(1, 1, 1), ue8m0)
        return e4m3_codes(wide, nan, scale), scale
    if granularity == TOKEN:
        scale = fp8_scale(size.amax(-1, keepdim=True), ue8m0)
        return e4m3_codes(wide, nan, scale), scale
    if granularity == BLOCK:
        strips = grouped(size.transpose(1, 2), BLOCK_SIZE).amax(-1)  # [B, K, blocks of rows]
        scale = fp8_scale(grouped(strips.transpose(1, 2), BLOCK_SIZE).amax(-1), ue8m0)
        return e4m3_codes(wide, nan, spread(scale, x.shape, BLOCK_SIZE, BLOCK_SIZE)), scale
    scale = fp8_scale(grouped(size, group_size).amax(-1), ue8m0)
    return e4m3_codes(wide, nan, spread(scale, x.shape, 1, group_size)), scale


def spread(scale: Tensor, shape: torch.Size, rows: int, columns: int) -> Tensor:
    """Scales [..., R, C] of areas of rows x columns, for each element of [..., M, K]."""
    if rows > 1:
        scale = scale.repeat_interleave(rows, -2)[..., : shape[-2], :]
    return scale.repeat_interleave(columns, -1)[..., : shape[-1]]


def quantize_nvfp4_rows(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """[B, M, K] to uint8 [B, M, K / 2] and float8_e4m3fn scales [B, M, K / 16]."""
    wide, nan = (grouped(part, NVFP4_GROUP) for part in clean(x))
    scale, lost = nvfp4_scale(wide.abs().amax(-1), global_scale), nan.any(-1)
    codes = e2m1_codes(wide, lost.unsqueeze(-1), (scale.float() * global_scale).unsqueeze(-1))
    return codes.flatten(-2), scale.view(torch.uint8).masked_fill(lost, 0x7F).view(E4M3)


def quantize_mx_rows(x: Tensor, fp4: bool, round_up: bool) -> tuple[Tensor, Tensor]:
    """[B, M, K] to uint8 [B, M, K / 2] or float8_e4m3fn [B, M, K], and float8_e8m0fnu scales [B, M, groups]."""
    wide, nan = (grouped(part, MX_GROUP) for part in clean(x))
    scale = mx_scale(wide.abs().amax(-1), fp4, round_up)
    factor = from_e8m0(scale).unsqueeze(-1)
    if not fp4:
        codes = e4m3_codes(wide, nan, factor).view(torch.uint8).flatten(-2)[..., : x.shape[-1]]
        return codes.contiguous().view(E4M3), scale
    lost = nan.any(-1)
    codes = e2m1_codes(wide, lost.unsqueeze(-1), factor).flatten(-2)
    return codes, scale.view(torch.uint8).masked_fill(lost, 0xFF).view(E8M0)


def scale_values(scale: Tensor) -> Tensor:
    """Scales of any dtype as float32; float8_e8m0fnu exactly, 2^-127 included."""
    return from_e8m0(scale) if scale.dtype in (E8M0, torch.uint8) else scale.float()


def dequantize_rows(
    codes: Tensor, scale: Tensor, global_scale: Tensor | None, rows: int, columns: int, dtype: torch.dtype
) -> Tensor:
    """[B, M, K] of codes with scales [B, R, C] of areas of rows x columns; 0 columns mean all of a row."""
    values = from_e2m1(codes) if codes.dtype == torch.uint8 else codes.float()
    factors = scale_values(scale)
    if columns:
        factors = spread(factors, values.shape, rows, columns)
    values = values * factors
    return (values if global_scale is None else values * global_scale).to(dtype)


def quantize_fp8_reference(
    x: Tensor,
    granularity: str = TOKEN,
    group_size: int = 128,
    scale: Tensor | None = None,
    ue8m0: bool = False,
    scale_dtype: torch.dtype = torch.float32,
    scale_layout: str = "row",
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`quantize_fp8`; destinations are ignored, scales are row-major."""
    block = granularity == BLOCK
    rows = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:]) if block else x.reshape(1, -1, x.shape[-1])
    if scale is not None:
        wide, nan = clean(rows)
        factor = scale.reshape(1, 1, 1) if scale.numel() == 1 else scale.reshape(1, -1, 1)
        return e4m3_codes(wide, nan, factor).view(x.shape), scale
    power_of_two = ue8m0 or scale_dtype == E8M0
    if not x.numel():
        made = x.new_full(fp8_scale_shape(x.shape, granularity, group_size), LEAST_SCALE, dtype=torch.float32)
        return x.new_empty(x.shape, dtype=E4M3), to_e8m0_up(made) if scale_dtype == E8M0 else made
    codes, made = quantize_fp8_rows(rows, granularity, group_size, power_of_two)
    made = made.reshape(fp8_scale_shape(x.shape, granularity, group_size))
    return codes.view(x.shape), to_e8m0_up(made) if scale_dtype == E8M0 else made


def quantize_nvfp4_reference(
    x: Tensor,
    global_scale: Tensor | None = None,
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_global_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`quantize_nvfp4`; destinations are ignored."""
    *lead, width = x.shape
    if global_scale is None:
        size = clean(x)[0].abs()
        global_scale = global_scale_of(size.amax().view(1) if x.numel() else size.new_zeros(1))
    codes, scale = quantize_nvfp4_rows(x.reshape(1, -1, width), global_scale.reshape(()))
    return codes.reshape(*lead, width // 2), scale.reshape(*lead, width // NVFP4_GROUP), global_scale


def quantize_mxfp4_reference(
    x: Tensor, scale_rounding: str = "floor", out: Tensor | None = None, out_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`quantize_mxfp4`; destinations are ignored."""
    *lead, width = x.shape
    codes, scale = quantize_mx_rows(x.reshape(1, -1, width), True, scale_rounding == "up")
    return codes.reshape(*lead, width // 2), scale.reshape(*lead, width // MX_GROUP)


def quantize_mxfp8_reference(
    x: Tensor, scale_rounding: str = "floor", out: Tensor | None = None, out_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`quantize_mxfp8`; destinations are ignored."""
    *lead, width = x.shape
    codes, scale = quantize_mx_rows(x.reshape(1, -1, width), False, scale_rounding == "up")
    return codes.reshape(x.shape), scale.reshape(*lead, -(-width // MX_GROUP))


def dequantize_fp8_reference(
    x: Tensor,
    scale: Tensor,
    group_size: int = 128,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """`dequantize_fp8`; the destination is ignored."""
    *lead, width = x.shape
    if scale.numel() == 1:
        return dequantize_rows(x, scale.reshape(()), None, 1, 0, out_dtype)
    if scale.shape in (torch.Size(lead), (*lead, 1)):
        return dequantize_rows(x, scale.reshape(*lead, 1), None, 1, 0, out_dtype)
    if scale.shape == (*lead, -(-width // group_size)):
        rows, factors = x.reshape(1, -1, width), scale.reshape(1, -1, scale.shape[-1])
        return dequantize_rows(rows, factors, None, 1, group_size, out_dtype).view(x.shape)
    rows, factors = x.reshape(-1, *x.shape[-2:]), scale.reshape(-1, *scale.shape[-2:])
    return dequantize_rows(rows, factors, None, BLOCK_SIZE, BLOCK_SIZE, out_dtype).view(x.shape)


def dequantize_nvfp4_reference(
    x: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """`dequantize_nvfp4`; the destination is ignored."""
    return _by_groups(x.view(torch.uint8), scale, global_scale.reshape(()), NVFP4_GROUP, out_dtype)


def dequantize_mxfp4_reference(
    x: Tensor, scale: Tensor, out_dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None
) -> Tensor:
    """`dequantize_mxfp4`; the destination is ignored."""
    return _by_groups(x.view(torch.uint8), scale, None, MX_GROUP, out_dtype)


def dequantize_mxfp8_reference(
    x: Tensor, scale: Tensor, out_dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None
) -> Tensor:
    """`dequantize_mxfp8`; the destination is ignored."""
    return _by_groups(x, scale, None, MX_GROUP, out_dtype)


def _by_groups(x: Tensor, scale: Tensor, global_scale: Tensor | None, group: int, dtype: torch.dtype) -> Tensor:
    rows, factors = x.reshape(1, -1, x.shape[-1]), scale.reshape(1, -1, scale.shape[-1])
    values = dequantize_rows(rows, factors, global_scale, 1, group, dtype)
    return values.view(*x.shape[:-1], values.shape[-1])
