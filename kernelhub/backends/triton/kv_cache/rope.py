# mypy: ignore-errors
"""Queries rotated in place, and new tokens with rotated keys into the pages of a KV cache.

A program has a block of heads of tokens, those of queries before those of keys.

    a, b = the two columns of each pair: i and i + HALF, or 2 i and 2 i + 1
    a', b' = a cos - b sin, b cos + a sin

in float32 without fused operations, so that every kernel gives the same bits, rounded to the dtype of the tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.kv_cache.write import encoded, scale_of


@triton.jit(
    do_not_specialize=["rows", "slots", "q_heads", "max_position"],
    do_not_specialize_on_alignment=["slot_mapping", "k_scale_at", "v_scale_at", "positions", "cos_sin"],
)
def rope_write_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slot_mapping,
    k_scale_at,
    v_scale_at,
    q,
    positions,
    cos_sin,
    k_scale,
    v_scale,
    rows,
    slots,
    q_heads,
    max_position,
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
    stride_qt,
    stride_qh,
    stride_qd,
    stride_p,
    stride_cp,
    stride_cd,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST: tl.constexpr,
    REST_PAD: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    KIND: tl.constexpr,
    NEOX: tl.constexpr,
    HAS_Q: tl.constexpr,
):
    """A row is a head of a token, of q or of k and v."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists, heads = row < rows, q_heads + HEADS
    token, place_of = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    position = tl.load(positions + token * stride_p, exists, other=-1)
    turns = (position >= 0) & (position < max_position)
    of_q, head = place_of < q_heads, place_of - q_heads
    slot = tl.load(slot_mapping + token * stride_s, exists, other=-1)
    there = turns & (slot >= 0) & (slot < slots) & (head >= 0)
    page, place = slot // PAGE, slot % PAGE

    i = tl.arange(0, HALF_PAD)[None, :]
    mask = turns[:, None] & (i < HALF)
    cos = tl.load(cos_sin + (position * stride_cp)[:, None] + i * stride_cd, mask, other=0.0)
    sin = tl.load(cos_sin + (position * stride_cp)[:, None] + (i + HALF) * stride_cd, mask, other=0.0)
    if NEOX:
        first, second = i, i + HALF
    else:
        first, second = 2 * i, 2 * i + 1
    of_key = k + (token * stride_kt + head * stride_kh)[:, None]
    mask = there[:, None] & (i < HALF)
    a = tl.load(of_key + first * stride_kd, mask, other=0.0).to(tl.float32)
    b = tl.load(of_key + second * stride_kd, mask, other=0.0).to(tl.float32)
    scale = scale_of(k_scale_at, k_scale, head, there, KIND)
    to_key = k_cache + (page * stride_kcp + place * stride_kct + head * stride_kch)[:, None]
    one, other = (a * cos - b * sin).to(k.dtype.element_ty), (b * cos + a * sin).to(k.dtype.element_ty)
    tl.store(to_key + first * stride_kcd, encoded(one, scale, FORMAT), mask)
    tl.store(to_key + second * stride_kcd, encoded(other, scale, FORMAT), mask)
    if REST > 0:
        d = 2 * HALF + tl.arange(0, REST_PAD)[None, :]
        mask = there[:, None] & (d < 2 * HALF + REST)
        rest = tl.load(of_key + d * stride_kd, mask, other=0.0)
        tl.store(to_key + d * stride_kcd, encoded(rest, scale, FORMAT), mask)
    d = tl.arange(0, DV_PAD)[None, :]
    mask = there[:, None] & (d < DV)
    value = tl.load(v + (token * stride_vt + head * stride_vh)[:, None] + d * stride_vd, mask, other=0.0)
    to_value = v_cache + (page * stride_vcp + place * stride_vct + head * stride_vch)[:, None]
    code = encoded(value, scale_of(v_scale_at, v_scale, head, there, KIND), FORMAT)
    tl.store(to_value + d * stride_vcd, code, mask)

    if HAS_Q:
        of_query = q + (token * stride_qt + place_of * stride_qh)[:, None]
        mask = (turns & of_q)[:, None] & (i < HALF)
        a = tl.load(of_query + first * stride_qd, mask, other=0.0).to(tl.float32)
        b = tl.load(of_query + second * stride_qd, mask, other=0.0).to(tl.float32)
        tl.debug_barrier()  # a thread may hold what another one writes
        tl.store(of_query + first * stride_qd, (a * cos - b * sin).to(q.dtype.element_ty), mask)
        tl.store(of_query + second * stride_qd, (b * cos + a * sin).to(q.dtype.element_ty), mask)
