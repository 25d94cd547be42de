# mypy: ignore-errors
"""Latent attention's keys: a block of tokens of one head per program, its own part and the shared one copied."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def concat_kernel(
    k_nope,
    k_rope,
    out,
    tokens,
    stride_nt,
    stride_nh,
    stride_nd,
    stride_rt,
    stride_rd,
    stride_ot,
    stride_oh,
    stride_od,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    NOPE_PAD: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    COPIES: tl.constexpr,
):
    """COPIES: whether k_nope is to be copied, not already in place."""
    program = tl.program_id(0)
    head = (program % HEADS).to(tl.int64)
    token = (program // HEADS * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    row = out + head * stride_oh + token * stride_ot
    if COPIES:
        d = tl.arange(0, NOPE_PAD)[None, :]
        mask = (token < tokens) & (d < NOPE)
        own = tl.load(k_nope + head * stride_nh + token * stride_nt + d * stride_nd, mask)
        tl.store(row + d * stride_od, own, mask)
    r = tl.arange(0, ROPE_PAD)[None, :]
    mask = (token < tokens) & (r < ROPE)
    shared = tl.load(k_rope + token * stride_rt + r * stride_rd, mask)
    tl.store(row + (NOPE + r) * stride_od, shared, mask)
