# mypy: ignore-errors
"""RMSNorm, or SiLU and product, of a row per program, and its quantisation.

A row of up to BLOCK elements stays in registers (WHOLE). A wider one is read again, from the cache, for each step: its
sum of squares, its largest magnitude where the row has one scale, its results. NaN and infinity as in
`kernelhub.ops.quant`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.formats import E2M1_MAX, e4m3_to_float, float_to_e2m1
from kernelhub.backends.triton.quant.quantize import (
    e4m3_codes,
    fp8_scale,
    mx_scale,
    nvfp4_scale,
    quotients,
    reciprocal_of_e8m0,
    row_codes,
    sizes,
    store_fp8_scale,
    within,
)


@triton.jit
def summed(x, residual, residual_out, stride_xc, stride_rc, stride_tc, column, mask, HAS_RESIDUAL: tl.constexpr):
    """x, or x plus the residual rounded to its dtype, which is stored."""
    total = tl.load(x + column * stride_xc, mask, other=0.0)
    if HAS_RESIDUAL:
        more = tl.load(residual + column * stride_rc, mask, other=0.0).to(tl.float32)
        total = (total.to(tl.float32) + more).to(x.dtype.element_ty)
        tl.store(residual_out + column * stride_tc, total, mask)
    return total.to(tl.float32)


@triton.jit
def factors(weight, stride_w, column, mask, UNIT_OFFSET: tl.constexpr):
    factor = tl.load(weight + column * stride_w, mask, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        factor += 1.0
    return factor


@triton.jit
def activated(x, stride_xc, columns, column, mask):
    gate = tl.load(x + column * stride_xc, mask, other=0.0).to(tl.float32)
    up = tl.load(x + (columns + column) * stride_xc, mask, other=0.0).to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def store_row(
    y,
    out,
    scale_out,
    given,
    stride_oc,
    stride_sc,
    start,
    columns,
    column,
    mask,
    FORMAT: tl.constexpr,
    UE8M0: tl.constexpr,
    E8M0: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    FUSED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Results and scales of a stretch of a row, that begins at `start`; of formats whose scale is not the row's."""
    if FORMAT == "none":
        tl.store(out + column * stride_oc, y.to(out.dtype.element_ty), mask)
    elif FORMAT == "fp8_tensor":
        quotient = tl.div_rn(within(y, LARGEST), given)
        tl.store(out + column * stride_oc, e4m3_codes(quotient, NATIVE), mask)
    else:
        GROUP: tl.constexpr = 128 if FORMAT == "fp8_group" else 32 if FORMAT == "mxfp8" else 16
        GROUPS: tl.constexpr = BLOCK // GROUP
        value = tl.reshape(within(y, LARGEST), [GROUPS, GROUP])
        group = start // GROUP + tl.arange(0, GROUPS)
        there = group * GROUP < columns
        at = scale_out + group.to(tl.int64) * stride_sc
        if FORMAT == "fp8_group":
            scale = fp8_scale(tl.max(sizes(value), 1), UE8M0)
            store_fp8_scale(at, 0, scale, there, E8M0)
            if UE8M0:
                quotient = value * tl.div_rn(1.0, scale)[:, None]
            else:
                quotient = quotients(value, scale[:, None], FUSED, True)
            tl.store(out + column * stride_oc, tl.reshape(e4m3_codes(quotient, NATIVE), [BLOCK]), mask)
        elif FORMAT == "mxfp8":
            raw = mx_scale(tl.max(sizes(value), 1), False, False)
            tl.store(at, raw, there)
            quotient = value * reciprocal_of_e8m0(raw)[:, None]
            tl.store(out + column * stride_oc, tl.reshape(e4m3_codes(quotient, NATIVE), [BLOCK]), mask)
        else:
            # As integers NaN is the largest magnitude, so that one maximum finds it too.
            top = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
            lost = top > 0x7F800000
            amax = tl.minimum(top.to(tl.float32, bitcast=True), LARGEST)
            raw = nvfp4_scale(tl.div_rn(tl.div_rn(amax, E2M1_MAX), given))
            scale = e4m3_to_float(raw, tl.float32, NATIVE) * given
            quotient = tl.div_rn(value, tl.broadcast_to(scale[:, None], value.shape))
            quotient = tl.where(quotient != quotient, 0.0, quotient)
            tl.store(at, tl.where(lost, 0x7F, raw).to(tl.uint8), there)
            low, high = tl.split(tl.reshape(float_to_e2m1(quotient), [GROUPS, GROUP // 2, 2]))
            packed = tl.where(lost[:, None], 0, low | (high << 4)).to(tl.uint8)
            pair = start // 2 + tl.arange(0, BLOCK // 2)
            tl.store(out + pair * stride_oc, tl.reshape(packed, [BLOCK // 2]), pair < columns // 2)


@triton.jit
def store_whole_row(
    y,
    out,
    scale_out,
    given,
    stride_oc,
    stride_sc,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    UE8M0: tl.constexpr,
    E8M0: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    FUSED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Results and scales of a row."""
    column = tl.arange(0, BLOCK)
    mask = column < COLUMNS
    if FORMAT == "fp8_token":
        value = within(y, LARGEST)
        scale = fp8_scale(tl.max(sizes(value), 0), UE8M0)
        store_fp8_scale(scale_out, 0, scale, None, E8M0)
        tl.store(out + column * stride_oc, row_codes(value, scale, UE8M0, FUSED, NATIVE), mask)
    else:
        store_row(
            y,
            out,
            scale_out,
            given,
            stride_oc,
            stride_sc,
            0,
            COLUMNS,
            column,
            mask,
            FORMAT,
            UE8M0,
            E8M0,
            LARGEST,
            BLOCK,
            FUSED,
            NATIVE,
        )


_VARYING = ["stride_sr", "stride_sc", "eps"]
_UNALIGNED = ["scale_out", "given_scale"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def norm_kernel(
    x,
    weight,
    residual,
    given_scale,
    out,
    scale_out,
    residual_out,
    eps,
    stride_xr,
    stride_xc,
    stride_w,
    stride_rr,
    stride_rc,
    stride_or,
    stride_oc,
    stride_sr,
    stride_sc,
    stride_tr,
    stride_tc,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    UE8M0: tl.constexpr,
    E8M0: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    FUSED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """A row of RMSNorm. A sum that was stored is read again from there."""
    row = tl.program_id(0).to(tl.int64)
    x += row * stride_xr
    out += row * stride_or
    if HAS_RESIDUAL:
        residual += row * stride_rr
        residual_out += row * stride_tr
    if FORMAT != "none" and FORMAT != "fp8_tensor":
        scale_out += row * stride_sr
    given = 1.0
    if FORMAT == "fp8_tensor" or FORMAT == "nvfp4":
        given = tl.load(given_scale)
    column = tl.arange(0, BLOCK)
    if WHOLE:
        mask = column < COLUMNS
        total = summed(x, residual, residual_out, stride_xc, stride_rc, stride_tc, column, mask, HAS_RESIDUAL)
        inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(total * total, 0) / COLUMNS + eps))
        y = total * inverse * factors(weight, stride_w, column, mask, UNIT_OFFSET)
        store_whole_row(
            y,
            out,
            scale_out,
            given,
            stride_oc,
            stride_sc,
            COLUMNS,
            FORMAT,
            UE8M0,
            E8M0,
            LARGEST,
            BLOCK,
            FUSED,
            NATIVE,
        )
    else:
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, COLUMNS, BLOCK):
            at = start + column
            total = summed(x, residual, residual_out, stride_xc, stride_rc, stride_tc, at, at < COLUMNS, HAS_RESIDUAL)
            squares += total * total
        inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(squares, 0) / COLUMNS + eps))
        if HAS_RESIDUAL:
            x = residual_out
            stride_xc = stride_tc
            tl.debug_barrier()  # what other threads of the program stored is read
        scale = 1.0
        if FORMAT == "fp8_token":
            top = tl.zeros([BLOCK], tl.float32)
            for start in range(0, COLUMNS, BLOCK):
                at = start + column
                total = tl.load(x + at * stride_xc, at < COLUMNS, other=0.0).to(tl.float32)
                y = total * inverse * factors(weight, stride_w, at, at < COLUMNS, UNIT_OFFSET)
                top = tl.maximum(top, sizes(within(y, LARGEST)))
            scale = fp8_scale(tl.max(top, 0), UE8M0)
            store_fp8_scale(scale_out, 0, scale, None, E8M0)
        for start in range(0, COLUMNS, BLOCK):
            at = start + column
            mask = at < COLUMNS
            total = tl.load(x + at * stride_xc, mask, other=0.0).to(tl.float32)
            y = total * inverse * factors(weight, stride_w, at, mask, UNIT_OFFSET)
            if FORMAT == "fp8_token":
                tl.store(out + at * stride_oc, row_codes(within(y, LARGEST), scale, UE8M0, FUSED, NATIVE), mask)
            else:
                store_row(
                    y,
                    out,
                    scale_out,
                    given,
                    stride_oc,
                    stride_sc,
                    start,
                    COLUMNS,
                    at,
                    mask,
                    FORMAT,
                    UE8M0,
                    E8M0,
                    LARGEST,
                    BLOCK,
                    FUSED,
                    NATIVE,
                )


@triton.jit(do_not_specialize=_VARYING[:2], do_not_specialize_on_alignment=_UNALIGNED)
def activation_kernel(
    x,
    given_scale,
    out,
    scale_out,
    stride_xr,
    stride_xc,
    stride_or,
    stride_oc,
    stride_sr,
    stride_sc,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    UE8M0: tl.constexpr,
    E8M0: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    FUSED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """A row, or a stretch of BLOCK of it where it has no scale of its own."""
    CHUNKS: tl.constexpr = 1 if FORMAT == "fp8_token" else (COLUMNS + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    x += row * stride_xr
    out += row * stride_or
    if FORMAT != "none" and FORMAT != "fp8_tensor":
        scale_out += row * stride_sr
    given = 1.0
    if FORMAT == "fp8_tensor" or FORMAT == "nvfp4":
        given = tl.load(given_scale)
    if FORMAT != "fp8_token":
        start = tl.program_id(0) % CHUNKS * BLOCK
        column = start + tl.arange(0, BLOCK)
        mask = column < COLUMNS
        store_row(
            activated(x, stride_xc, COLUMNS, column, mask),
            out,
            scale_out,
            given,
            stride_oc,
            stride_sc,
            start,
            COLUMNS,
            column,
            mask,
            FORMAT,
            UE8M0,
            E8M0,
            LARGEST,
            BLOCK,
            FUSED,
            NATIVE,
        )
    elif WHOLE:
        column = tl.arange(0, BLOCK)
        mask = column < COLUMNS
        value = within(activated(x, stride_xc, COLUMNS, column, mask), LARGEST)
        scale = fp8_scale(tl.max(sizes(value), 0), UE8M0)
        store_fp8_scale(scale_out, 0, scale, None, E8M0)
        tl.store(out + column * stride_oc, row_codes(value, scale, UE8M0, FUSED, NATIVE), mask)
    else:
        column = tl.arange(0, BLOCK)
        top = tl.zeros([BLOCK], tl.float32)
        for start in range(0, COLUMNS, BLOCK):
            at = start + column
            top = tl.maximum(top, sizes(within(activated(x, stride_xc, COLUMNS, at, at < COLUMNS), LARGEST)))
        scale = fp8_scale(tl.max(top, 0), UE8M0)
        store_fp8_scale(scale_out, 0, scale, None, E8M0)
        for start in range(0, COLUMNS, BLOCK):
            at = start + column
            value = within(activated(x, stride_xc, COLUMNS, at, at < COLUMNS), LARGEST)
            tl.store(out + at * stride_oc, row_codes(value, scale, UE8M0, FUSED, NATIVE), at < COLUMNS)
