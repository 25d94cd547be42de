# mypy: ignore-errors
"""Merging attention states: a tile of tokens of one head per program, all parts one after the other.

    for each part: m' = max(m, lse); acc = acc * 2^(m - m') + out * 2^(lse - m'), and so for the sum
    store acc / sum and m + log(sum)

A part without keys weighs nothing, and what stands in its place is not let in. Every element is read before any
is written by the program that reads it, so the result may take the place of a part.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.formats import LN2, LOG2E

# Not the strides of results, whose divisibility by 16 lets 16 bytes be loaded at once: without it a merge takes three
# times as long on an H200.
_VARYING = ["parts", "tokens", "stride_lse_part", *(f"stride_l{part}{dim}" for part in "abo" for dim in "bht")]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["lse_a", "lse_b", "lse_out"])
def merge_states_kernel(
    out_a,
    out_b,
    out,
    lse_a,
    lse_b,
    lse_out,
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

    top = tl.load(lse_a + at_lse_a, there, other=float("-inf")) * LOG2E
    top = tl.where(top == float("inf"), float("-inf"), top)
    has_keys = top != float("-inf")
    total = tl.where(has_keys, 1.0, 0.0)
    acc = tl.where(has_keys[:, None], tl.load(out_a + at_a, mask, other=0.0).to(tl.float32), 0.0)
    for _ in range(parts - 1):
        lse = tl.load(lse_b + at_lse_b, there, other=float("-inf")) * LOG2E
        lse = tl.where(lse == float("inf"), float("-inf"), lse)
        value = tl.load(out_b + at_b, mask, other=0.0).to(tl.float32)
        higher = tl.where(lse == lse, tl.maximum(top, lse), lse)  # NaN stays
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp2(top - finite)
        weight = tl.exp2(lse - finite)
        acc = acc * kept[:, None] + tl.where((weight == 0.0)[:, None], 0.0, value * weight[:, None])
        total = total * kept + weight
        top = higher
        at_b += stride_out_part
        at_lse_b += stride_lse_part
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]

    at_out = batch * stride_ob + head * stride_oh + token[:, None] * stride_ot + d[None, :] * stride_od
    tl.store(out + at_out, acc.to(out.dtype.element_ty), mask)
    if HAS_LSE:
        merged = tl.where(total == 0.0, float("-inf"), top + tl.log2(total)) * LN2
        tl.store(lse_out + batch * stride_lob + head * stride_loh + token * stride_lot, merged, there)
