# mypy: ignore-errors
"""Quantisation to float8 and float4, bit for bit as `kernelhub.ops.quant.reference` says.

    amax of a group; scale = max(amax / 448, 2^-126), or as the format has it; code = encode(x / scale)

Divisions round to nearest (`tl.div_rn`): Triton's `/` of float32 is two units off on a GPU. Where the scale is a
power of two, a product with its reciprocal is the same and costs one instruction.

A program takes GROUPS groups of a row. Without groups (a scale that is known), a group is any stretch of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.formats import (
    E2M1_MAX,
    E4M3_MAX,
    e4m3_to_float,
    e8m0_to_float,
    float_to_e2m1,
    float_to_e4m3,
    float_to_e8m0_up,
)

LEAST_SCALE = tl.constexpr(2.0**-126)
LEAST_NVFP4_SCALE = tl.constexpr(2.0**-9)
LEAST_GLOBAL_SCALE = tl.constexpr(2.0**-117)

_VARYING = ["rows", "columns", "matrices", "units", "parts", "stride_sb", "stride_sr", "stride_sc"]


@triton.jit
def load_clean(x, at, mask, LARGEST: tl.constexpr):
    """float32 with infinity at the largest finite number and NaN at 0, and where NaN was."""
    value = tl.load(x + at, mask, other=0.0).to(tl.float32)
    nan = value != value
    value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
    return tl.where(nan, 0.0, value), nan


@triton.jit
def fp8_scale(amax, UE8M0: tl.constexpr):
    scale = tl.maximum(tl.div_rn(amax, E4M3_MAX), LEAST_SCALE)
    if UE8M0:
        scale = e8m0_to_float(float_to_e8m0_up(scale))
    return scale


@triton.jit
def store_fp8_scale(scale_out, at, scale, mask, E8M0: tl.constexpr):
    """A float32, or the exponent of a power of two."""
    if E8M0:
        tl.store(scale_out + at, (scale.to(tl.uint32, bitcast=True) >> 23).to(tl.uint8), mask)
    else:
        tl.store(scale_out + at, scale, mask)


@triton.jit
def e4m3_codes(value, nan, scale, POWER_OF_TWO: tl.constexpr):
    """Codes of value / scale; `scale` is broadcast to the value's shape, or is its reciprocal for powers of two."""
    if POWER_OF_TWO:
        quotient = value * scale
    else:
        quotient = tl.div_rn(value, scale)
    return tl.where(nan | (quotient != quotient), 0x7F, float_to_e4m3(quotient)).to(tl.uint8)


@triton.jit
def reciprocal_of_e8m0(raw):
    """2^(127 - raw) for raw up to 253, exactly."""
    return ((254 - raw.to(tl.uint32)) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["scale_out", "global_scale"])
def groups_kernel(
    x,
    codes,
    scale_out,
    global_scale,
    rows,
    columns,
    stride_xr,
    stride_xc,
    stride_cr,
    stride_cc,
    stride_sr,
    stride_sc,
    FORMAT: tl.constexpr,
    UE8M0: tl.constexpr,
    E8M0: tl.constexpr,
    ROUND_UP: tl.constexpr,
    LARGEST: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Groups of a row, each with its own scale. FORMAT is fp8, nvfp4, mxfp4 or mxfp8."""
    chunks = tl.cdiv(tl.cdiv(columns, GROUP), GROUPS)
    row = (tl.program_id(0) // chunks).to(tl.int64)
    group = tl.program_id(0) % chunks * GROUPS + tl.arange(0, GROUPS)
    within = tl.arange(0, GROUP_PAD)
    column = group[:, None] * GROUP + within[None, :]
    mask = (within < GROUP)[None, :] & (column < columns)
    value, nan = load_clean(x, row * stride_xr + column * stride_xc, mask, LARGEST)
    amax = tl.max(tl.abs(value), 1)
    there = group * GROUP < columns
    at_scale = row * stride_sr + group.to(tl.int64) * stride_sc

    if FORMAT == "fp8":
        scale = fp8_scale(amax, UE8M0)
        store_fp8_scale(scale_out, at_scale, scale, there, E8M0)
        if UE8M0:
            scale = tl.div_rn(1.0, scale)
    elif FORMAT == "nvfp4":
        factor = tl.load(global_scale)
        wanted = tl.div_rn(tl.div_rn(amax, E2M1_MAX), factor)
        wanted = tl.where(wanted > LEAST_NVFP4_SCALE, wanted, LEAST_NVFP4_SCALE)
        raw = float_to_e4m3(wanted)
        scale = e4m3_to_float(raw, tl.float32, False) * factor
    else:
        FP4: tl.constexpr = FORMAT == "mxfp4"
        if ROUND_UP:
            raw = float_to_e8m0_up(tl.div_rn(amax, E2M1_MAX if FP4 else E4M3_MAX))
        else:
            exponent = (amax.to(tl.uint32, bitcast=True) >> 23).to(tl.int32) - (2 if FP4 else 8)
            raw = tl.maximum(exponent, 0).to(tl.uint8)
        scale = reciprocal_of_e8m0(raw)

    if FORMAT == "fp8" or FORMAT == "mxfp8":
        if FORMAT == "mxfp8":
            tl.store(scale_out + at_scale, raw, there)
        POWER_OF_TWO: tl.constexpr = UE8M0 or FORMAT == "mxfp8"
        code = e4m3_codes(value, nan, scale[:, None], POWER_OF_TWO)
        tl.store(codes + row * stride_cr + column * stride_cc, code, mask)
    else:
        lost = tl.max(nan.to(tl.int32), 1) != 0
        LOST_SCALE: tl.constexpr = 0x7F if FORMAT == "nvfp4" else 0xFF
        tl.store(scale_out + at_scale, tl.where(lost, LOST_SCALE, raw).to(tl.uint8), there)
        if FORMAT == "nvfp4":
            quotient = tl.div_rn(value, tl.broadcast_to(scale[:, None], [GROUPS, GROUP_PAD]))
        else:
            quotient = value * scale[:, None]
        quotient = tl.where(lost[:, None] | (quotient != quotient), 0.0, quotient)
        low, high = tl.split(tl.reshape(float_to_e2m1(quotient), [GROUPS, GROUP_PAD // 2, 2]))
        pair = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP_PAD // 2)[None, :]
        at = row * stride_cr + pair * stride_cc
        tl.store(codes + at, (low | (high << 4)).to(tl.uint8), pair < columns // 2)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["scale_out"])
def tokens_kernel(
    x,
    codes,
    scale_out,
    rows,
    columns,
    stride_xr,
    stride_xc,
    stride_cr,
    stride_cc,
    stride_sr,
    UE8M0: tl.constexpr,
    E8M0: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row: once for its amax, once more, from the cache, for its codes."""
    row = tl.program_id(0).to(tl.int64)
    top = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value, _ = load_clean(x, row * stride_xr + column * stride_xc, column < columns, LARGEST)
        top = tl.maximum(top, tl.abs(value))
    scale = fp8_scale(tl.max(top, 0), UE8M0)
    store_fp8_scale(scale_out, row * stride_sr, scale, None, E8M0)
    if UE8M0:
        scale = tl.div_rn(1.0, scale)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value, nan = load_clean(x, row * stride_xr + column * stride_xc, column < columns, LARGEST)
        code = e4m3_codes(value, nan, scale, UE8M0)
        tl.store(codes + row * stride_cr + column * stride_cc, code, column < columns)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["scale"])
def given_kernel(
    x,
    codes,
    scale,
    rows,
    columns,
    stride_xr,
    stride_xc,
    stride_cr,
    stride_cc,
    stride_sr,
    E8M0: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A stretch of a row with a scale that is known, of the row or, with stride 0, of the tensor."""
    chunks = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // chunks).to(tl.int64)
    column = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(scale + row * stride_sr)
    if E8M0:
        factor = e8m0_to_float(factor)
    value, nan = load_clean(x, row * stride_xr + column * stride_xc, column < columns, LARGEST)
    code = e4m3_codes(value, nan, factor, False)
    tl.store(codes + row * stride_cr + column * stride_cc, code, column < columns)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["scale_out"])
def blocks_kernel(
    x,
    codes,
    scale_out,
    rows,
    columns,
    stride_xb,
    stride_xr,
    stride_xc,
    stride_cb,
    stride_cr,
    stride_cc,
    stride_sb,
    stride_sr,
    stride_sc,
    UE8M0: tl.constexpr,
    E8M0: tl.constexpr,
    LARGEST: tl.constexpr,
    SIZE: tl.constexpr,
):
    """A block of SIZE x SIZE."""
    across, down = tl.cdiv(columns, SIZE), tl.cdiv(rows, SIZE)
    program = tl.program_id(0)
    right, below = program % across, program // across % down
    matrix = (program // (across * down)).to(tl.int64)
    row = (below * SIZE + tl.arange(0, SIZE)).to(tl.int64)[:, None]
    column = (right * SIZE + tl.arange(0, SIZE))[None, :]
    mask = (row < rows) & (column < columns)
    value, nan = load_clean(x, matrix * stride_xb + row * stride_xr + column * stride_xc, mask, LARGEST)
    scale = fp8_scale(tl.max(tl.max(tl.abs(value), 1), 0), UE8M0)
    at_scale = matrix * stride_sb + below.to(tl.int64) * stride_sr + right * stride_sc
    store_fp8_scale(scale_out, at_scale, scale, None, E8M0)
    if UE8M0:
        scale = tl.div_rn(1.0, scale)
    code = e4m3_codes(value, nan, scale, UE8M0)
    tl.store(codes + matrix * stride_cb + row * stride_cr + column * stride_cc, code, mask)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["parts_out"])
def amax_kernel(
    x, parts_out, rows, columns, units, stride_xr, stride_xc, parts, LARGEST: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest magnitude of every parts-th stretch of a row."""
    chunks = tl.cdiv(columns, BLOCK)
    top = tl.zeros([BLOCK], tl.float32)
    for unit in range(tl.program_id(0), units, parts):
        row = (unit // chunks).to(tl.int64)
        column = unit % chunks * BLOCK + tl.arange(0, BLOCK)
        value, _ = load_clean(x, row * stride_xr + column * stride_xc, column < columns, LARGEST)
        top = tl.maximum(top, tl.abs(value))
    tl.store(parts_out + tl.program_id(0), tl.max(top, 0))


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["parts_in", "scale_out"])
def scale_kernel(
    parts_in, scale_out, parts, NVFP4: tl.constexpr, UE8M0: tl.constexpr, E8M0: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: the parts' maximum, and the scale of the whole tensor."""
    part = tl.arange(0, BLOCK)
    amax = tl.max(tl.load(parts_in + part, part < parts, other=0.0), 0)
    if NVFP4:
        tl.store(scale_out, tl.maximum(tl.div_rn(amax, E4M3_MAX * E2M1_MAX), LEAST_GLOBAL_SCALE))
    else:
        store_fp8_scale(scale_out, 0, fp8_scale(amax, UE8M0), None, E8M0)
