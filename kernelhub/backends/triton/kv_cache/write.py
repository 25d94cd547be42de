# mypy: ignore-errors
"""New tokens into the pages of a KV cache: a block of heads of tokens per program, keys and values in one pass.

float8: values are divided by the scale, as IEEE 754 divides, and rounded. Otherwise their bits are copied.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.formats import float_to_e4m3, float_to_e5m2


@triton.jit
def encoded(values, scale, FORMAT: tl.constexpr):
    """Values in the format of the cache: e4m3, e5m2, or as they are."""
    result = values
    if FORMAT == "e4m3":
        result = float_to_e4m3(tl.div_rn(values.to(tl.float32), scale))
    elif FORMAT == "e5m2":
        result = float_to_e5m2(tl.div_rn(values.to(tl.float32), scale))
    return result


@triton.jit
def scale_of(pointer, value, head, there, KIND: tl.constexpr):
    """The scales of a block's heads: a number, one for all on the device, or one for each head."""
    if KIND == "head":
        scale = tl.load(pointer + head, there, other=1.0)[:, None]
    elif KIND == "tensor":
        scale = tl.load(pointer)
    else:
        scale = value
    return scale


@triton.jit(
    do_not_specialize=["rows", "slots"], do_not_specialize_on_alignment=["slot_mapping", "k_scale_at", "v_scale_at"]
)
def write_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slot_mapping,
    k_scale_at,
    v_scale_at,
    k_scale,
    v_scale,
    rows,
    slots,
    stride_kt,
    stride_kh,
    stride_kd,
    stride_vt,
    stride_vh,
    stride_vd,
    stride_kcp,
    stride_kct,
    stride_kch,
    stride_kcd,
    stride_vcp,
    stride_vct,
    stride_vch,
    stride_vcd,
    stride_s,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    KIND: tl.constexpr,
):
    """A row is a head of a token. For a slot from `slots` on, which is past the cache, nothing is written."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token, head = (row // HEADS).to(tl.int64), (row % HEADS).to(tl.int64)
    slot = tl.load(slot_mapping + token * stride_s, mask=row < rows, other=-1).to(tl.int64)
    there = (slot >= 0) & (slot < slots)
    page, place = slot // PAGE, slot % PAGE
    d = tl.arange(0, D_PAD)[None, :]
    mask = there[:, None] & (d < D)
    key = tl.load(k + (token * stride_kt + head * stride_kh)[:, None] + d * stride_kd, mask, other=0)
    at = page * stride_kcp + place * stride_kct + head * stride_kch
    code = encoded(key, scale_of(k_scale_at, k_scale, head, there, KIND), FORMAT)
    tl.store(k_cache + at[:, None] + d * stride_kcd, code, mask)
    d = tl.arange(0, DV_PAD)[None, :]
    mask = there[:, None] & (d < DV)
    value = tl.load(v + (token * stride_vt + head * stride_vh)[:, None] + d * stride_vd, mask, other=0)
    at = page * stride_vcp + place * stride_vct + head * stride_vch
    code = encoded(value, scale_of(v_scale_at, v_scale, head, there, KIND), FORMAT)
    tl.store(v_cache + at[:, None] + d * stride_vcd, code, mask)
