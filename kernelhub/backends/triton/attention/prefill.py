# mypy: ignore-errors
"""Prefill: a tile of query rows per program, in one pass over the keys that the tile sees.

    program -> (sequence, KV head, row block), the longest blocks of a causal sequence first
    load Q once; keys that only some rows see are masked, those between are not:
        [low, full_low) masked if there is a left window, [full_low, full_high), [full_high, high) masked
    add the sink to the denominator, divide, store

BLOCK_M is at least 64 where a GPU has warpgroup products, so that Triton emits wgmma or tcgen05.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.attention.softmax import (
    attend,
    key_range,
    load_queries,
    sequence_bounds,
    sequence_of,
    store_rows,
)

# Sizes that change from call to call, and operands that may begin anywhere; specialising on them would compile in
# the middle of a request.
_VARYING = [
    "num_seqs",
    "q_tokens",
    "kv_tokens",
    "last_page",
    "window_left",
    "window_right",
    "stride_table",
    "stride_lb",
    "stride_lh",
    "stride_lt",
]
_ANYWHERE = ["lse", "sinks", "k_scale", "v_scale", "cu_seqlens_q", "cu_seqlens_k", "block_table", "seq_lens"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def prefill_kernel(
    q,
    k,
    v,
    out,
    lse,
    sinks,
    k_scale,
    v_scale,
    cu_seqlens_q,
    cu_seqlens_k,
    block_table,
    seq_lens,
    score_scale,
    value_scale,
    softcap,
    num_seqs,
    q_tokens,
    kv_tokens,
    last_page,
    window_left,
    window_right,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_qd,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_kd,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_vd,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_od,
    stride_lb,
    stride_lh,
    stride_lt,
    stride_table,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    RAGGED: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
    SIGN: tl.constexpr,
    MIN_ROWS: tl.constexpr,
):
    """One program per row block. SCALES: 0 folded in by the host, 1 one element, 2 one per KV head.

    SIGN is that of the scores' scale, as far as the host knows it.

    With MIN_ROWS, sequences of that many rows or fewer are left to the split-KV kernel.
    """
    program = tl.program_id(0)
    if RAGGED:
        kv_head = program % KV_HEADS
        sequence, block = sequence_of(program // KV_HEADS, cu_seqlens_q, num_seqs, GROUP, BLOCK_M)
    else:
        blocks = tl.cdiv(q_tokens * GROUP, BLOCK_M)
        block = blocks - 1 - program % blocks
        kv_head = program // blocks % KV_HEADS
        sequence = program // (blocks * KV_HEADS)
    q_start, q_len, kv_start, kv_len = sequence_bounds(
        sequence, cu_seqlens_q, cu_seqlens_k, seq_lens, q_tokens, kv_tokens, RAGGED, PAGE
    )
    if (block < 0) | (block * BLOCK_M >= q_len * GROUP) | (q_len * GROUP <= MIN_ROWS):
        return
    q += q_start.to(tl.int64) * stride_qt
    out += q_start.to(tl.int64) * stride_ot
    k += kv_start.to(tl.int64) * stride_kt + kv_head.to(tl.int64) * stride_kh
    v += kv_start.to(tl.int64) * stride_vt + kv_head.to(tl.int64) * stride_vh
    pages = block_table
    if PAGE > 0:
        pages += sequence.to(tl.int64) * stride_table
    if not RAGGED:
        q += sequence.to(tl.int64) * stride_qb
        out += sequence.to(tl.int64) * stride_ob
        if PAGE == 0:
            k += sequence.to(tl.int64) * stride_kb
            v += sequence.to(tl.int64) * stride_vb
        if HAS_LSE:
            lse += sequence.to(tl.int64) * stride_lb
    if SCALES > 0:
        scale_index = kv_head if SCALES == 2 else 0
        score_scale *= tl.load(k_scale + scale_index)
        value_scale *= tl.load(v_scale + scale_index)

    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    valid = token < q_len
    position = kv_len - q_len + token
    q0, q1, scale = load_queries(
        q,
        token.to(tl.int64) * stride_qt + head.to(tl.int64) * stride_qh,
        valid,
        stride_qd,
        score_scale,
        D,
        D0,
        D1,
        FP8,
        SIGN,
    )

    first = block * BLOCK_M // GROUP
    last = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP, q_len - 1)
    low, high = key_range(first, last, q_len, kv_len, window_left, window_right, HAS_LEFT, HAS_RIGHT, BLOCK_N)
    full_low = low
    full_high = high // BLOCK_N * BLOCK_N
    if HAS_LEFT:
        full_low = tl.cdiv(tl.maximum(kv_len - q_len + last - window_left, 0), BLOCK_N) * BLOCK_N
    if HAS_RIGHT:
        full_high = tl.minimum(kv_len - q_len + first + window_right + 1, kv_len)
        full_high = tl.maximum(full_high, 0) // BLOCK_N * BLOCK_N

    acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_LEFT:
        acc, m, total = attend(
            acc, m, total, q0, q1, k, v, pages, position, low, tl.minimum(full_low, high), kv_len,
            last_page, scale, softcap, window_left, window_right,
            stride_kb, stride_kt, stride_kd, stride_vb, stride_vt, stride_vd,
            PAGE, D, D0, D1, DV, DV_PAD, BLOCK_N, True, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, FP8, NATIVE_FP8, PRECISION,
        )  # fmt: skip
    acc, m, total = attend(
        acc, m, total, q0, q1, k, v, pages, position, full_low, full_high, kv_len,
        last_page, scale, softcap, window_left, window_right,
        stride_kb, stride_kt, stride_kd, stride_vb, stride_vt, stride_vd,
        PAGE, D, D0, D1, DV, DV_PAD, BLOCK_N, False, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, FP8, NATIVE_FP8, PRECISION,
    )  # fmt: skip
    acc, m, total = attend(
        acc, m, total, q0, q1, k, v, pages, position, tl.maximum(full_low, full_high), high, kv_len,
        last_page, scale, softcap, window_left, window_right,
        stride_kb, stride_kt, stride_kd, stride_vb, stride_vt, stride_vd,
        PAGE, D, D0, D1, DV, DV_PAD, BLOCK_N, True, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, FP8, NATIVE_FP8, PRECISION,
    )  # fmt: skip

    store_rows(
        acc, m, total, out, token.to(tl.int64) * stride_ot + head.to(tl.int64) * stride_oh, stride_od,
        lse, (q_start + token) * stride_lt + head.to(tl.int64) * stride_lh,
        sinks, head, valid, value_scale, DV, DV_PAD, HAS_SINKS, HAS_LSE,
    )  # fmt: skip
