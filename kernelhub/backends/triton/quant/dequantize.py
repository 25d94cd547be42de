# mypy: ignore-errors
"""Codes and scales back into floats: code * scale, rounded to float32, then times the global scale, if there is one.

A program takes GROUPS groups of a row; a scale is loaded once for a group. Where a row or the tensor shares a scale,
a group is any stretch of the row and the stride of scales along it is 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.formats import e2m1_to_float, e4m3_to_float, e8m0_to_float

_VARYING = ["rows", "stride_sb", "stride_sr", "stride_sc", "scale_rows"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["scale", "global_scale"])
def dequantize_kernel(
    codes,
    scale,
    global_scale,
    out,
    rows,
    columns,
    stride_cb,
    stride_cr,
    stride_cc,
    stride_ob,
    stride_or,
    stride_oc,
    stride_sb,
    stride_sr,
    stride_sc,
    scale_rows,
    FP4: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_GLOBAL: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    GROUPS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """SCALE is the scales' dtype: float32, e4m3 or e8m0. `columns` counts elements.

    That many rows share scales. No constant, since of one row nothing tells a block's scales from a group's: what was
    warmed up with many rows must serve it too.
    """
    chunks = tl.cdiv(tl.cdiv(columns, GROUP), GROUPS)
    program = tl.program_id(0)
    row = (program // chunks % rows).to(tl.int64)
    matrix = (program // chunks // rows).to(tl.int64)
    group = program % chunks * GROUPS + tl.arange(0, GROUPS)
    at_scale = matrix * stride_sb + row // scale_rows * stride_sr + group.to(tl.int64) * stride_sc
    factor = tl.load(scale + at_scale, group * GROUP < columns, other=0)
    if SCALE == "e4m3":
        factor = e4m3_to_float(factor, tl.float32, NATIVE)
    elif SCALE == "e8m0":
        factor = e8m0_to_float(factor)

    within = tl.arange(0, GROUP_PAD)
    column = group[:, None] * GROUP + within[None, :]
    mask = (within < GROUP)[None, :] & (column < columns)
    at = matrix * stride_cb + row * stride_cr
    if FP4:
        pair = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP_PAD // 2)[None, :]
        raw = tl.load(codes + at + pair * stride_cc, pair < columns // 2, other=0)
        value = tl.reshape(tl.join(e2m1_to_float(raw), e2m1_to_float(raw >> 4)), [GROUPS, GROUP_PAD])
    else:
        value = e4m3_to_float(tl.load(codes + at + column * stride_cc, mask, other=0), tl.float32, NATIVE)
    value = value * factor[:, None]
    if HAS_GLOBAL:
        value = value * tl.load(global_scale)
    at_out = matrix * stride_ob + row * stride_or + column * stride_oc
    tl.store(out + at_out, value.to(out.dtype.element_ty), mask)
