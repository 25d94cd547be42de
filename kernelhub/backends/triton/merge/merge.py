# mypy: ignore-errors
"""Merging attention states: a tile of tokens of one head per program, all parts one after the other.

    for each part: m' = max(m, lse); acc = acc * 2^(m - m') + out * 2^(lse - m'), and so for the sum
    store acc / sum and m + log(sum)

With SCALE the result is stored over a scale as float8_e4m3fn bytes: 1 for a number, 2 for one in memory.

A part without keys has weight zero, and its values are masked. Every element is read before any
is written by the program that reads it, so the result may take the place of a part.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.formats import LN2, LOG2E, float_to_e4m3


@triton.jit
def first(outs, lses, there, mask):
    """The running maximum, sum and weighted sum after one part, whose pointers are given."""
    top = tl.load(lses, there, other=float("-inf")) * LOG2E
    top = tl.where(top == float("inf"), float("-inf"), top)
    has_keys = top != float("-inf")
    total = tl.where(has_keys, 1.0, 0.0)
    acc = tl.where(has_keys[:, None], tl.load(outs, mask, other=0.0).to(tl.float32), 0.0)
    return top, total, acc


@triton.jit
def absorb(top, total, acc, outs, lses, there, mask):
    """The same after one part more."""
    lse = tl.load(lses, there, other=float("-inf")) * LOG2E
    lse = tl.where(lse == float("inf"), float("-inf"), lse)
    value = tl.load(outs, mask, other=0.0).to(tl.float32)
    higher = tl.where(lse == lse, tl.maximum(top, lse), lse)  # NaN stays
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    kept = tl.exp2(top - finite)
    weight = tl.exp2(lse - finite)
    acc = acc * kept[:, None] + tl.where((weight == 0.0)[:, None], 0.0, value * weight[:, None])
    return higher, total * kept + weight, acc


# Not the strides of results, whose divisibility by 16 lets 16 bytes be loaded at once: without it a merge takes three
# times as long on an H200.
_VARYING = ["parts", "tokens", "stride_lse_part", *(f"stride_l{part}{dim}" for part in "abo" for dim in "bht")]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["lse_a", "lse_b", "lse_out", "scale_at"])
def merge_states_kernel(
    out_a,
    out_b,
    out,
    lse_a,
    lse_b,
    lse_out,
    scale_value,
    scale_at,
    parts,
    tokens,
    stride_out_part,
    stride_lse_part,
    stride_ab,
    stride_at,
    stride_ah,
    stride_ad,
    stride_bb,
    stride_bt,
    stride_bh,
    stride_bd,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_od,
    stride_lab,
    stride_lah,
    stride_lat,
    stride_lbb,
    stride_lbh,
    stride_lbt,
    stride_lob,
    stride_loh,
    stride_lot,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_LSE: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Part 0 is at `out_a`, part i from 1 up at `out_b` + (i - 1) * `stride_out_part`."""
    program = tl.program_id(0)
    blocks = tl.cdiv(tokens, BLOCK)
    head = (program % HEADS).to(tl.int64)
    block = program // HEADS % blocks
    batch = (program // (HEADS * blocks)).to(tl.int64)
    token = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    d = tl.arange(0, D_PAD)
    there = token < tokens
    mask = there[:, None] & (d < D)[None, :]

    at_a = batch * stride_ab + head * stride_ah + token[:, None] * stride_at + d[None, :] * stride_ad
    at_b = batch * stride_bb + head * stride_bh + token[:, None] * stride_bt + d[None, :] * stride_bd
    at_lse_a = batch * stride_lab + head * stride_lah + token * stride_lat
    at_lse_b = batch * stride_lbb + head * stride_lbh + token * stride_lbt

    top, total, acc = first(out_a + at_a, lse_a + at_lse_a, there, mask)
    for _ in range(parts - 1):
        top, total, acc = absorb(top, total, acc, out_b + at_b, lse_b + at_lse_b, there, mask)
        at_b += stride_out_part
        at_lse_b += stride_lse_part
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]

    at_out = batch * stride_ob + head * stride_oh + token[:, None] * stride_ot + d[None, :] * stride_od
    if SCALE == 0:
        tl.store(out + at_out, acc.to(out.dtype.element_ty), mask)
    elif SCALE == 1:
        tl.store(out + at_out, float_to_e4m3(acc / scale_value), mask)
    else:
        tl.store(out + at_out, float_to_e4m3(acc / tl.load(scale_at)), mask)
    if HAS_LSE:
        merged = tl.where(total == 0.0, float("-inf"), top + tl.log2(total)) * LN2
        tl.store(lse_out + batch * stride_lob + head * stride_loh + token * stride_lot, merged, there)


MOST_APART = 8
_APART = "abcdefgh"


@triton.jit(
    do_not_specialize=["tokens", *(f"stride_l{part}{dim}" for part in "io" for dim in "bht")],
    do_not_specialize_on_alignment=[*(f"lse_{part}" for part in _APART), "lse_out", "scale_at"],
)
def merge_apart_kernel(
    out_a,
    out_b,
    out_c,
    out_d,
    out_e,
    out_f,
    out_g,
    out_h,
    lse_a,
    lse_b,
    lse_c,
    lse_d,
    lse_e,
    lse_f,
    lse_g,
    lse_h,
    out,
    lse_out,
    scale_value,
    scale_at,
    tokens,
    stride_ib,
    stride_it,
    stride_ih,
    stride_id,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_od,
    stride_lib,
    stride_lih,
    stride_lit,
    stride_lob,
    stride_loh,
    stride_lot,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_LSE: tl.constexpr,
    SCALE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Three parts or more, each in a tensor of its own, all of the same strides; those from PARTS on are not read."""
    program = tl.program_id(0)
    blocks = tl.cdiv(tokens, BLOCK)
    head = (program % HEADS).to(tl.int64)
    block = program // HEADS % blocks
    batch = (program // (HEADS * blocks)).to(tl.int64)
    token = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    d = tl.arange(0, D_PAD)
    there = token < tokens
    mask = there[:, None] & (d < D)[None, :]

    at = batch * stride_ib + head * stride_ih + token[:, None] * stride_it + d[None, :] * stride_id
    at_lse = batch * stride_lib + head * stride_lih + token * stride_lit
    top, total, acc = first(out_a + at, lse_a + at_lse, there, mask)
    top, total, acc = absorb(top, total, acc, out_b + at, lse_b + at_lse, there, mask)
    top, total, acc = absorb(top, total, acc, out_c + at, lse_c + at_lse, there, mask)
    if PARTS > 3:
        top, total, acc = absorb(top, total, acc, out_d + at, lse_d + at_lse, there, mask)
    if PARTS > 4:
        top, total, acc = absorb(top, total, acc, out_e + at, lse_e + at_lse, there, mask)
    if PARTS > 5:
        top, total, acc = absorb(top, total, acc, out_f + at, lse_f + at_lse, there, mask)
    if PARTS > 6:
        top, total, acc = absorb(top, total, acc, out_g + at, lse_g + at_lse, there, mask)
    if PARTS > 7:
        top, total, acc = absorb(top, total, acc, out_h + at, lse_h + at_lse, there, mask)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]

    at_out = batch * stride_ob + head * stride_oh + token[:, None] * stride_ot + d[None, :] * stride_od
    if SCALE == 0:
        tl.store(out + at_out, acc.to(out.dtype.element_ty), mask)
    elif SCALE == 1:
        tl.store(out + at_out, float_to_e4m3(acc / scale_value), mask)
    else:
        tl.store(out + at_out, float_to_e4m3(acc / tl.load(scale_at)), mask)
    if HAS_LSE:
        merged = tl.where(total == 0.0, float("-inf"), top + tl.log2(total)) * LN2
        tl.store(lse_out + batch * stride_lob + head * stride_loh + token * stride_lot, merged, there)
