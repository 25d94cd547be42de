# mypy: ignore-errors
"""Quantisation to float8 and float4, bit for bit as `kernelhub.ops.quant.reference` says.

    amax of a group; scale = max(amax / 448, 2^-126), or as the format has it; code = encode(x / scale)

Divisions round to nearest: Triton's `/` of float32 is two units off on a GPU, and `tl.div_rn` branches per element.
With FUSED a group's reciprocal is rounded once, and each quotient is corrected twice by what a fused multiply-add finds
missing (`quotients`). Where the scale is a power of two, a product with its reciprocal is the same.

NaN goes through all of this as NaN, which is 0x7f in float8; float4 has none, so there a group's scale carries it.

Where the largest magnitude of the tensor gives its scale (OWN), few stretches of it are read by each program, some are
read by one program each before, whose maxima each program then compares, and many have a launch that does so once.

A program takes GROUPS groups of a row. Without groups (a scale that is known), a group is any stretch of it. Widths are
specialised on, as strides are: masks of an unknown width make loads and stores of single elements.
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

STRETCH = 4096  # elements of a row that a program reads at once for their maximum
MOST_PARTS = 1024  # partial maxima of a tensor, which one program takes together
MOST_READ = 256  # of them that each program reads
LEAST_SCALE = tl.constexpr(2.0**-126)
LEAST_NVFP4_SCALE = tl.constexpr(2.0**-9)
LEAST_GLOBAL_SCALE = tl.constexpr(2.0**-117)
LEAST_EXACT_SCALE, MOST_EXACT_SCALE = tl.constexpr(2.0**-90), tl.constexpr(2.0**90)

_VARYING = ["rows", "matrices", "units", "parts", "stride_sb", "stride_sr", "stride_sc"]
_STRETCH, _MOST_PARTS, _MOST_READ = tl.constexpr(STRETCH), tl.constexpr(MOST_PARTS), tl.constexpr(MOST_READ)


@triton.jit
def within(x, most):
    """float32 values between -most and most; NaN stays."""
    x = tl.maximum(x, -most, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, most, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sizes(x):
    """Magnitudes, of NaN 0."""
    return tl.maximum(tl.abs(x), 0.0)


@triton.jit
def quotients(x, scale, FUSED: tl.constexpr, LIFTS: tl.constexpr):
    """x / scale, rounded to nearest.

    FUSED: y = RN(1 / scale) gives q = RN(x y), at most 1.5 units off. A first q + (x - q scale) y is faithful, a second
    one rounds right (Markstein 1990), if remainders are exact and nothing overflows: |x| up to 1024 scale, and scale
    from 2^-90 to 2^120, whose x below 2^-102 give less than any format's least number. LIFTS multiplies smaller
    scales and their x by 2^64, exactly. Remainders are taken as q scale - x, with which -0 / scale stays -0.
    """
    if not FUSED:
        return tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    if LIFTS:
        lift = tl.where(scale < LEAST_EXACT_SCALE, 18446744073709551616.0, 1.0)
        scale = scale * lift
        x = x * lift
    y = tl.div_rn(1.0, scale)
    negative = x * -1.0  # Triton's -x is 0 - x, which of 0 is not -0
    q = x * y
    q = tl.fma(tl.fma(q, scale, negative), -y, q)
    return tl.fma(tl.fma(q, scale, negative), -y, q)


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
def stored_scale(scale, E8M0: tl.constexpr):
    """What `store_fp8_scale` stored."""
    found = tl.load(scale)
    return e8m0_to_float(found) if E8M0 else found


@triton.jit
def e4m3_codes(quotient, NATIVE: tl.constexpr):
    """Codes of float32; NaN is 0x7f, as the conversion of NVIDIA GPUs has it."""
    if NATIVE:
        return quotient.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(quotient != quotient, 0x7F, float_to_e4m3(quotient)).to(tl.uint8)


@triton.jit
def reciprocal_of_e8m0(raw):
    """2^(127 - raw) for raw up to 253, exactly."""
    return ((254 - raw.to(tl.uint32)) << 23).to(tl.float32, bitcast=True)


@triton.jit
def amax_of_stretches(x, columns, first, units, parts, stride_xr, stride_xc, LARGEST: tl.constexpr):
    """The largest magnitude of every parts-th stretch of a row from the first on."""
    chunks = tl.cdiv(columns, _STRETCH)
    top = tl.zeros([_STRETCH], tl.float32)
    for unit in range(first, units, parts):
        row = (unit // chunks).to(tl.int64)
        column = unit % chunks * _STRETCH + tl.arange(0, _STRETCH)
        value = tl.load(x + row * stride_xr + column * stride_xc, column < columns, other=0.0).to(tl.float32)
        top = tl.maximum(top, sizes(value))
    return tl.max(tl.minimum(top, LARGEST), 0)


@triton.jit
def amax_of_all(x, maxima, columns, units, parts, stride_xr, stride_xc, LARGEST: tl.constexpr, MOST: tl.constexpr):
    """The largest magnitude of a tensor: that of its `parts`, or of its stretches if there are none."""
    if parts > 0:
        part = tl.arange(0, MOST)
        amax = tl.max(tl.load(maxima + part, part < parts, other=0.0), 0)
    else:
        amax = amax_of_stretches(x, columns, 0, units, 1, stride_xr, stride_xc, LARGEST)
    return amax


@triton.jit
def nvfp4_global_scale(amax):
    return tl.maximum(tl.div_rn(amax, E4M3_MAX * E2M1_MAX), LEAST_GLOBAL_SCALE)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["scale_out", "global_scale", "maxima"])
def groups_kernel(
    x,
    codes,
    scale_out,
    global_scale,
    maxima,
    units,
    parts,
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
    OWN: tl.constexpr,
    FUSED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Groups of a row, each with its own scale. FORMAT is fp8, nvfp4, mxfp4 or mxfp8. OWN: of nvfp4 `global_scale` is
    found here and stored by the first program, unless `parts` is below 0.
    """
    chunks = tl.cdiv(tl.cdiv(columns, GROUP), GROUPS)
    row = (tl.program_id(0) // chunks).to(tl.int64)
    group = tl.program_id(0) % chunks * GROUPS + tl.arange(0, GROUPS)
    inner = tl.arange(0, GROUP_PAD)
    column = group[:, None] * GROUP + inner[None, :]
    mask = (inner < GROUP)[None, :] & (column < columns)
    if FORMAT == "nvfp4":  # before anything else is in registers
        if OWN:
            if parts < 0:
                factor = tl.load(global_scale)
            else:
                amax = amax_of_all(x, maxima, columns, units, parts, stride_xr, stride_xc, LARGEST, _MOST_READ)
                factor = nvfp4_global_scale(amax)
                if tl.program_id(0) == 0:
                    tl.store(global_scale, factor)
        else:
            factor = tl.load(global_scale)
    x = tl.load(x + row * stride_xr + column * stride_xc, mask, other=0.0).to(tl.float32)
    there = group * GROUP < columns
    at_scale = row * stride_sr + group.to(tl.int64) * stride_sc

    if FORMAT == "fp8":
        value = within(x, LARGEST)
        scale = fp8_scale(tl.max(sizes(value), 1), UE8M0)
        store_fp8_scale(scale_out, at_scale, scale, there, E8M0)
        if UE8M0:
            quotient = value * tl.div_rn(1.0, scale)[:, None]
        else:
            quotient = quotients(value, scale[:, None], FUSED, True)
        tl.store(codes + row * stride_cr + column * stride_cc, e4m3_codes(quotient, NATIVE), mask)
    elif FORMAT == "mxfp8":
        value = within(x, LARGEST)
        raw = mx_scale(tl.max(sizes(value), 1), False, ROUND_UP)
        tl.store(scale_out + at_scale, raw, there)
        quotient = value * reciprocal_of_e8m0(raw)[:, None]
        tl.store(codes + row * stride_cr + column * stride_cc, e4m3_codes(quotient, NATIVE), mask)
    else:
        # As integers NaN is the largest magnitude, so that one maximum finds it too.
        top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
        lost = top > 0x7F800000
        amax = tl.minimum(top.to(tl.float32, bitcast=True), LARGEST)
        if FORMAT == "nvfp4":
            if FUSED & (factor >= 512 * LEAST_EXACT_SCALE) & (factor <= MOST_EXACT_SCALE):
                # Of magnitudes too small for exact remainders the scale is the least in any case.
                wanted = tl.minimum(quotients(amax, tl.full([], E2M1_MAX, tl.float32), FUSED, False), 512.0 * factor)
                raw = nvfp4_scale(quotients(wanted, factor, FUSED, False))
                scale = (e4m3_to_float(raw, tl.float32, NATIVE) * factor)[:, None]
                quotient = quotients(within(x, tl.minimum(16.0 * scale, LARGEST)), scale, FUSED, False)
            else:
                raw = nvfp4_scale(tl.div_rn(tl.div_rn(amax, E2M1_MAX), factor))
                scale = (e4m3_to_float(raw, tl.float32, NATIVE) * factor)[:, None]
                quotient = tl.div_rn(within(x, LARGEST), tl.broadcast_to(scale, x.shape))
                quotient = tl.where(quotient != quotient, 0.0, quotient)
        else:
            raw = mx_scale(amax, True, ROUND_UP)
            quotient = within(x, LARGEST) * reciprocal_of_e8m0(raw)[:, None]
        LOST_SCALE: tl.constexpr = 0x7F if FORMAT == "nvfp4" else 0xFF
        tl.store(scale_out + at_scale, tl.where(lost, LOST_SCALE, raw).to(tl.uint8), there)
        low, high = tl.split(tl.reshape(float_to_e2m1(quotient), [GROUPS, GROUP_PAD // 2, 2]))
        pair = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP_PAD // 2)[None, :]
        packed = tl.where(lost[:, None], 0, low | (high << 4)).to(tl.uint8)
        tl.store(codes + row * stride_cr + pair * stride_cc, packed, pair < columns // 2)


@triton.jit
def nvfp4_scale(wanted):
    """float8_e4m3fn bytes."""
    return float_to_e4m3(tl.where(wanted > LEAST_NVFP4_SCALE, wanted, LEAST_NVFP4_SCALE))


@triton.jit
def mx_scale(amax, FP4: tl.constexpr, ROUND_UP: tl.constexpr):
    """float8_e8m0fnu bytes."""
    if ROUND_UP:
        return float_to_e8m0_up(tl.div_rn(amax, E2M1_MAX if FP4 else E4M3_MAX))
    exponent = (amax.to(tl.uint32, bitcast=True) >> 23).to(tl.int32) - (2 if FP4 else 8)
    return tl.maximum(exponent, 0).to(tl.uint8)


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
    WHOLE: tl.constexpr,
    FUSED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """A row: once for its amax and, if not WHOLE and kept in registers, once more, from the cache, for its codes."""
    row = tl.program_id(0).to(tl.int64)
    x += row * stride_xr
    codes += row * stride_cr
    column = tl.arange(0, BLOCK)
    if WHOLE:
        value = within(tl.load(x + column * stride_xc, column < columns, other=0.0).to(tl.float32), LARGEST)
        top = sizes(value)
    else:
        top = tl.zeros([BLOCK], tl.float32)
        for start in range(0, columns, BLOCK):
            at = start + column
            value = tl.load(x + at * stride_xc, at < columns, other=0.0).to(tl.float32)
            top = tl.maximum(top, sizes(within(value, LARGEST)))
    scale = fp8_scale(tl.max(top, 0), UE8M0)
    store_fp8_scale(scale_out, row * stride_sr, scale, None, E8M0)
    if WHOLE:
        tl.store(codes + column * stride_cc, row_codes(value, scale, UE8M0, FUSED, NATIVE), column < columns)
    else:
        for start in range(0, columns, BLOCK):
            at = start + column
            value = within(tl.load(x + at * stride_xc, at < columns, other=0.0).to(tl.float32), LARGEST)
            tl.store(codes + at * stride_cc, row_codes(value, scale, UE8M0, FUSED, NATIVE), at < columns)


@triton.jit
def row_codes(value, scale, UE8M0: tl.constexpr, FUSED: tl.constexpr, NATIVE: tl.constexpr):
    """Of a tile with one scale, which its largest magnitude gave."""
    if UE8M0:
        quotient = value * tl.div_rn(1.0, scale)
    else:
        quotient = quotients(value, scale, FUSED, True)
    return e4m3_codes(quotient, NATIVE)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["scale", "maxima"])
def given_kernel(
    x,
    codes,
    scale,
    maxima,
    units,
    parts,
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
    OWN: tl.constexpr,
    FUSED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """A stretch of a row with a scale that is known, of the row or, with stride 0, of the tensor. OWN: the tensor's is
    found here and stored by the first program, unless `parts` is below 0.
    """
    chunks = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // chunks).to(tl.int64)
    column = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    if OWN:
        if parts < 0:
            factor = stored_scale(scale, E8M0)
        else:
            amax = amax_of_all(x, maxima, columns, units, parts, stride_xr, stride_xc, LARGEST, _MOST_READ)
            factor = fp8_scale(amax, UE8M0)
            if tl.program_id(0) == 0:
                store_fp8_scale(scale, 0, factor, None, E8M0)
    else:
        factor = stored_scale(scale + row * stride_sr, E8M0)
    value = tl.load(x + row * stride_xr + column * stride_xc, column < columns, other=0.0).to(tl.float32)
    if FUSED & (factor >= LEAST_EXACT_SCALE) & (factor <= MOST_EXACT_SCALE):
        quotient = quotients(within(value, tl.minimum(1024.0 * factor, LARGEST)), factor, FUSED, False)
    else:
        quotient = tl.div_rn(within(value, LARGEST), factor)
    code = e4m3_codes(quotient, NATIVE)
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
    FUSED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """A block of SIZE x SIZE."""
    across, down = tl.cdiv(columns, SIZE), tl.cdiv(rows, SIZE)
    program = tl.program_id(0)
    right, below = program % across, program // across % down
    matrix = (program // (across * down)).to(tl.int64)
    row = (below * SIZE + tl.arange(0, SIZE)).to(tl.int64)[:, None]
    column = (right * SIZE + tl.arange(0, SIZE))[None, :]
    mask = (row < rows) & (column < columns)
    at = matrix * stride_xb + row * stride_xr + column * stride_xc
    value = within(tl.load(x + at, mask, other=0.0).to(tl.float32), LARGEST)
    scale = fp8_scale(tl.max(tl.max(sizes(value), 1), 0), UE8M0)
    at_scale = matrix * stride_sb + below.to(tl.int64) * stride_sr + right * stride_sc
    store_fp8_scale(scale_out, at_scale, scale, None, E8M0)
    code = row_codes(value, scale, UE8M0, FUSED, NATIVE)
    tl.store(codes + matrix * stride_cb + row * stride_cr + column * stride_cc, code, mask)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["parts_out"])
def amax_kernel(x, parts_out, columns, units, stride_xr, stride_xc, parts, LARGEST: tl.constexpr):
    """A program for each part."""
    amax = amax_of_stretches(x, columns, tl.program_id(0), units, parts, stride_xr, stride_xc, LARGEST)
    tl.store(parts_out + tl.program_id(0), amax)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["parts_in", "scale_out"])
def scale_kernel(parts_in, scale_out, parts, NVFP4: tl.constexpr, UE8M0: tl.constexpr, E8M0: tl.constexpr):
    """One program: the parts' maximum, and the scale of the whole tensor."""
    part = tl.arange(0, _MOST_PARTS)
    amax = tl.max(tl.load(parts_in + part, part < parts, other=0.0), 0)
    if NVFP4:
        tl.store(scale_out, nvfp4_global_scale(amax))
    else:
        store_fp8_scale(scale_out, 0, fp8_scale(amax, UE8M0), None, E8M0)
