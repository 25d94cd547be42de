# mypy: ignore-errors
"""Rows of tokens to their places, in float8, and what experts made of them back to the tokens.

scale = max(|x|, 1e-10) / 448 of 1 x 128;  code = e4m3(x / scale)

Divisions round to nearest: Triton's `/` is two units off on a GPU, and gives other codes where two are equally near.
"""

from __future__ import annotations

import triton
import triton.language as tl

SMALLEST_AMAX = tl.constexpr(1e-10)
E4M3_MAX = tl.constexpr(448.0)


@triton.jit(
    do_not_specialize=["rows", "stride_wt", "stride_wk"],
    do_not_specialize_on_alignment=["places", "scales", "weights", "router"],
)
def spread_kernel(
    x, places, weights, codes, scales, router, rows, stride_xm, stride_xk, stride_wt, stride_wk, K: tl.constexpr,
    TOP_K: tl.constexpr, ON_INPUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK times 128 columns of a token, to all its places; codes [rows, K], scales [ceil(K / 128), rows].

    ON_INPUT: so are the weights of its choices, to `router` [rows].
    """
    groups: tl.constexpr = (K + 127) // 128
    across: tl.constexpr = (groups + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // across).to(tl.int64)
    group = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    mask = column < K
    values = tl.load(x + token * stride_xm + column * stride_xk, mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), 1)
    scale = tl.div_rn(tl.where(largest > SMALLEST_AMAX, largest, SMALLEST_AMAX), E4M3_MAX)
    code = tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape)).to(codes.dtype.element_ty)
    for choice in range(TOP_K):
        place = tl.load(places + token * TOP_K + choice).to(tl.int64)
        if place >= 0:
            tl.store(codes + place * K + column, code, mask)
            tl.store(scales + group.to(tl.int64) * rows + place, scale, group < groups)
            if ON_INPUT and tl.program_id(0) % across == 0:
                tl.store(router + place, tl.load(weights + token * stride_wt + choice * stride_wk))


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
