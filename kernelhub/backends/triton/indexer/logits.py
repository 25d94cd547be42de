# mypy: ignore-errors
"""The indexer's logits: a tile of keys per program, against queries one after the other.

    scores = k q^T                     [keys, heads]: heads are in the registers of few threads, which sum them
    logits = k_scale * (relu(scores) weights)
    store logits, -inf where the query does not see the key

Keys stay in registers while the program loops over queries. Tensor cores multiply float8 if they support it; otherwise
its bits are decoded to float16, 256 times too small, which FACTOR corrects.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.attention.softmax import page_of
from kernelhub.backends.triton.formats import e4m3_scaled


@triton.jit
def _values(pointers, mask, DECODES: tl.constexpr):
    """The operands of a product in its dtype."""
    if DECODES:
        values = e4m3_scaled(tl.load(pointers, mask, other=0), tl.float16, False)
    else:
        values = tl.load(pointers, mask, other=0.0)
    return values


@triton.jit
def _logits(
    k_tile,
    scale,
    q,
    weights,
    stride_qh,
    stride_qd,
    stride_wh,
    HEADS: tl.constexpr,
    H_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    DECODES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of one query, whose heads are at `q` and weights at `weights`, for a tile of keys."""
    h = tl.arange(0, H_PAD)
    d = tl.arange(0, D_PAD)
    mask = (h < HEADS)[:, None] & (d < D)[None, :]
    q_tile = _values(q + h[:, None] * stride_qh + d[None, :] * stride_qd, mask, DECODES)
    w = tl.load(weights + h * stride_wh, h < HEADS, other=0.0)
    scores = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
    positive = tl.maximum(scores, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.sum(positive * w[None, :], 1) * scale


@triton.jit(
    do_not_specialize=["tokens", "keys", "stride_ot"],
    do_not_specialize_on_alignment=["k_scale", "weights", "starts", "ends"],
)
def logits_kernel(
    q,
    k,
    k_scale,
    weights,
    starts,
    ends,
    out,
    tokens,
    keys,
    stride_qt,
    stride_qh,
    stride_qd,
    stride_kt,
    stride_kd,
    stride_s,
    stride_wt,
    stride_wh,
    stride_starts,
    stride_ends,
    stride_ot,
    stride_ok,
    HEADS: tl.constexpr,
    H_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    DECODES: tl.constexpr,
    FACTOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`mqa_logits`."""
    program = tl.program_id(0)
    tiles = tl.cdiv(keys, BLOCK_N)
    first_key = program % tiles * BLOCK_N
    first = program // tiles * BLOCK_T
    last = tl.minimum(first + BLOCK_T, tokens)
    n = first_key + tl.arange(0, BLOCK_N)
    there = n < keys
    row = out + first.to(tl.int64) * stride_ot + n.to(tl.int64) * stride_ok

    t = first + tl.arange(0, BLOCK_T)
    low = tl.min(tl.load(starts + t.to(tl.int64) * stride_starts, t < tokens, other=keys))
    high = tl.max(tl.load(ends + t.to(tl.int64) * stride_ends, t < tokens, other=0))
    if (low < first_key + BLOCK_N) & (high > first_key):
        d = tl.arange(0, D_PAD)
        at = n.to(tl.int64)[:, None] * stride_kt + d[None, :] * stride_kd
        k_tile = _values(k + at, there[:, None] & (d < D)[None, :], DECODES)
        scale = tl.full([BLOCK_N], FACTOR, tl.float32)
        if HAS_SCALE:
            scale *= tl.load(k_scale + n.to(tl.int64) * stride_s, there, other=0.0)
        wide = first.to(tl.int64)
        q += wide * stride_qt
        weights += wide * stride_wt
        starts += wide * stride_starts
        ends += wide * stride_ends
        for _ in range(last - first):
            logits = _logits(
                k_tile,
                scale,
                q,
                weights,
                stride_qh,
                stride_qd,
                stride_wh,
                HEADS,
                H_PAD,
                D,
                D_PAD,
                DECODES,
                PRECISION,
            )
            seen = (n >= tl.load(starts)) & (n < tl.load(ends))
            tl.store(row, tl.where(seen, logits, float("-inf")), there)
            q += stride_qt
            weights += stride_wt
            starts += stride_starts
            ends += stride_ends
            row += stride_ot
    else:
        for _ in range(last - first):
            tl.store(row, tl.full([BLOCK_N], float("-inf"), tl.float32), there)
            row += stride_ot


@triton.jit(
    do_not_specialize=["next_n", "columns", "held", "last_page", "stride_b", "stride_ot"],
    do_not_specialize_on_alignment=["k_scale", "weights", "block_table", "seq_lens"],
)
def paged_logits_kernel(
    q,
    k_cache,
    k_scale,
    weights,
    block_table,
    seq_lens,
    out,
    next_n,
    columns,
    held,
    last_page,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_qd,
    stride_kp,
    stride_kt,
    stride_kd,
    stride_sp,
    stride_st,
    stride_wt,
    stride_wh,
    stride_b,
    stride_l,
    stride_ot,
    stride_ok,
    HEADS: tl.constexpr,
    H_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    DECODES: tl.constexpr,
    FACTOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`paged_mqa_logits`; `held` is how many tokens the block table has pages for; none past `last_page` is read."""
    program = tl.program_id(0)
    tiles = tl.cdiv(columns, BLOCK_N)
    first_key = program % tiles * BLOCK_N
    sequence = (program // tiles).to(tl.int64)
    length = tl.load(seq_lens + sequence * stride_l)
    n = first_key + tl.arange(0, BLOCK_N)
    there = n < columns
    row = out + sequence * next_n * stride_ot + n.to(tl.int64) * stride_ok
    end = tl.minimum(length, held)
    if first_key < end:
        d = tl.arange(0, D_PAD)
        page = page_of(block_table + sequence * stride_b + n // PAGE, n < end, last_page, True)
        at = (page * stride_kp + n % PAGE * stride_kt)[:, None] + d[None, :] * stride_kd
        k_tile = _values(k_cache + at, (n < end)[:, None] & (d < D)[None, :], DECODES)
        scale = tl.full([BLOCK_N], FACTOR, tl.float32)
        if HAS_SCALE:
            scale *= tl.load(k_scale + page * stride_sp + n % PAGE * stride_st, n < end, other=0.0)
        q += sequence * stride_qb
        weights += sequence * next_n * stride_wt
        for token in range(next_n):
            logits = _logits(
                k_tile,
                scale,
                q,
                weights,
                stride_qh,
                stride_qd,
                stride_wh,
                HEADS,
                H_PAD,
                D,
                D_PAD,
                DECODES,
                PRECISION,
            )
            seen = (n < end) & (n <= length - next_n + token)
            tl.store(row, tl.where(seen, logits, float("-inf")), there)
            q += stride_qt
            weights += stride_wt
            row += stride_ot
    else:
        for _ in range(next_n):
            tl.store(row, tl.full([BLOCK_N], float("-inf"), tl.float32), there)
            row += stride_ot
