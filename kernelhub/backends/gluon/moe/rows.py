# mypy: ignore-errors
"""Rows of tokens in float8, and what experts made of them back to the tokens.

scale = max(|x|, 1e-10) / 448 of 1 x 128;  code = e4m3(x / scale)

Divisions round to nearest: Triton's `/` is two units off on a GPU, and gives other codes where two are equally near.
"""

from __future__ import annotations

import triton
import triton.language as tl

SMALLEST_AMAX = tl.constexpr(1e-10)
E4M3_MAX = tl.constexpr(448.0)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["scales", "counters"])
def code_kernel(x, codes, scales, counters, tokens, stride_xm, stride_xk, K: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK times 128 columns; codes [tokens, K up to whole 128], zeros beyond K, scales [tokens, ceil(K / 128)].

    `counters`, of tiles that the two products have handed out, become 0.
    """
    if tl.program_id(0) == 0:
        tl.store(counters + tl.arange(0, 2), tl.zeros((2,), dtype=tl.int32))
    groups: tl.constexpr = (K + 127) // 128
    piece = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    row = piece // groups
    there = row < tokens
    column = (piece % groups * 128)[:, None] + tl.arange(0, 128)[None, :]
    at = x + row[:, None] * stride_xm + column * stride_xk
    values = tl.load(at, there[:, None] & (column < K), other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), 1)
    scale = tl.div_rn(tl.where(largest > SMALLEST_AMAX, largest, SMALLEST_AMAX), E4M3_MAX)
    code = tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape)).to(codes.dtype.element_ty)
    tl.store(codes + row[:, None] * (groups * 128) + column, code, there[:, None])
    tl.store(scales + piece, scale, there)


@triton.jit(do_not_specialize=["stride_wt", "stride_wk"], do_not_specialize_on_alignment=["places", "weights"])
def sum_kernel(
    added, places, weights, residual, out, stride_wt, stride_wk, stride_rm, stride_rn, stride_om, stride_on,
    N: tl.constexpr, TOP_K: tl.constexpr, ON_INPUT: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of a token: its rows of `added` [rows, N] in the order of its choices, weighed unless ON_INPUT."""
    across: tl.constexpr = (N + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // across).to(tl.int64)
    n = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    mask = n < N
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in range(TOP_K):
        place = tl.load(places + token * TOP_K + choice).to(tl.int64)
        there = place >= 0
        of_choice = tl.load(added + place * N + n, mask & there, other=0.0).to(tl.float32)
        if not ON_INPUT:
            of_choice *= tl.load(weights + token * stride_wt + choice * stride_wk, there, other=0.0)
        total += of_choice
    if HAS_RESIDUAL:
        total += tl.load(residual + token * stride_rm + n * stride_rn, mask, other=0.0).to(tl.float32)
    tl.store(out + token * stride_om + n * stride_on, total.to(out.dtype.element_ty), mask)
