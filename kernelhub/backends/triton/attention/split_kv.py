# mypy: ignore-errors
"""Decode: the keys of a sequence are split among programs, and the last one or a second kernel merges the parts.

    split:  program -> (sequence, KV head, row block, split)
            splits in use = enough for CHUNK keys each, at most `splits`; decided here, from the length,
            each of adjacent blocks, or with AHEAD of every so many-th block;
            or with BALANCED and `shares` from the lengths of the whole batch: `balanced.py`
            attend to the split's keys; store the normalised part and its log2-sum-exp,
            or the result itself where one split holds all keys
            if few splits: count the program, and the last of its row block merges the parts of the block
    merge:  program -> one row; weigh the parts by 2^(lse - max), add the sink, store

Whichever program is the last, it merges the parts in their order, so the result does not depend on which it was. It
sets its counter to zero again, so the counters are zero between the launches of a stream.

Lengths are read on the device, so the grid does not depend on them and a step can be captured in a CUDA
graph. All query heads of a KV head, and all query tokens of a sequence, are rows of one tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.attention.balanced import (
    blocks_of_part,
    item_of,
    part_size,
    parts_before_last,
    stored_before,
)
from kernelhub.backends.triton.attention.softmax import (
    LN2,
    LOG2E,
    attend,
    entries_of,
    key_range,
    load_queries,
    sequence_bounds,
    store_rows,
)

# Sizes that change from call to call, and operands that may begin anywhere; specialising on them would compile in
# the middle of a request.
_VARYING = [
    "q_tokens",
    "kv_tokens",
    "last_page",
    "max_rows",
    "rows",
    "splits",
    "num_seqs",
    "shares",
    "filled",
    "least",
    "limit",
    "room",
    "merges",
    "window_left",
    "window_right",
    "stride_table",
    "stride_lb",
    "stride_lh",
    "stride_lt",
]
_ANYWHERE = ["lse", "sinks", "k_scale", "v_scale", "cu_seqlens_q", "cu_seqlens_k", "block_table", "seq_lens"]


@triton.jit
def split_bounds(low, high, splits, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr):
    """(splits in use, keys per split) for keys [low, high): at least one split, each of whole blocks."""
    blocks = tl.cdiv(high - low, BLOCK_N)
    wanted = tl.maximum(tl.minimum(tl.cdiv(high - low, CHUNK), splits), 1)
    blocks_each = tl.maximum(tl.cdiv(blocks, wanted), 1)
    return tl.maximum(tl.cdiv(blocks, blocks_each), 1), blocks_each * BLOCK_N


@triton.jit
def splits_in_turn(low, high, splits, filled, CHUNK: tl.constexpr, FULL: tl.constexpr):
    """Splits in use for keys [low, high) where each takes every so many-th block: at least one.

    Of CHUNK keys each; `filled` splits then get more, up to FULL, before there are more splits.
    """
    keys = high - low
    wanted = tl.maximum(tl.minimum(tl.cdiv(keys, CHUNK), filled), tl.cdiv(keys, FULL))
    return tl.maximum(tl.minimum(wanted, splits), 1)


@triton.jit
def merged_rows(part_out, part_lse, part, valid, used, ROWS: tl.constexpr, PARTS: tl.constexpr, DV_PAD: tl.constexpr):
    """(acc, m, total) of ROWS rows from their parts, which begin at `part`, PARTS at a time.

    A warp has whole rows and a thread all parts of an element, so that their reads are under way at once and no sum
    crosses threads: rows are the first axis for that.
    """
    dv = tl.arange(0, DV_PAD)
    acc = tl.zeros([ROWS, DV_PAD], tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, used, PARTS):
        s = start + tl.arange(0, PARTS)
        place = part[:, None] + s[None, :]
        there = valid[:, None] & (s < used)[None, :]
        part_m = tl.load(part_lse + place, mask=there, other=float("-inf"))
        values = tl.load(part_out + place[:, :, None] * DV_PAD + dv[None, None, :], mask=there[:, :, None], other=0.0)
        m_new = tl.maximum(m, tl.max(part_m, 1))
        m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
        weights = tl.exp2(part_m - m_finite[:, None])
        rescale = tl.exp2(m - m_finite)
        acc = acc * rescale[:, None] + tl.sum(values * weights[:, :, None], 1)
        total = total * rescale + tl.sum(weights, 1)
        m = m_new
    return acc, m, total


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def split_kernel(
    q,
    k,
    v,
    out,
    lse,
    part_out,
    part_lse,
    counters,
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
    q_tokens,
    kv_tokens,
    last_page,
    max_rows,
    splits,
    num_seqs,
    shares,
    filled,
    least,
    limit,
    room,
    merges,
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
    CHUNK: tl.constexpr,
    BALANCED: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
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
    AHEAD: tl.constexpr,
    FULL: tl.constexpr,
):
    """One program per split of a row block.

    With `merges` the last program of a row block merges its parts, the first ROWS rows; ROWS is 0 where none does so.
    `counters` has a zero for each row block then; no other launch may use them at the same time.
    `max_rows`, a multiple of BLOCK_M, bounds the rows of a sequence; ragged sequences of more are left to the
    prefill kernel. With BALANCED, and `shares` above 0, a row block holds all rows of a sequence, and the lengths share
    the keys out, in 2^`limit` parts of a sequence at most; memory has `room` for so many parts of a KV head.
    SCALES: 0 folded in by the host, 1 one element, 2 one per KV head.
    SIGN is that of the scores' scale, as far as the host knows it.
    With AHEAD entries of the block table are read before they are needed: those of the second and later blocks while
    the block before is under way, and those of the first one while the length is, since splits take blocks in turn.
    """
    IN_TURN: tl.constexpr = AHEAD and PAGE > 0 and not HAS_LEFT
    program = tl.program_id(0)
    row_blocks = max_rows // BLOCK_M
    coming = None
    if IN_TURN:
        coming = tl.zeros([BLOCK_N], block_table.dtype.element_ty)
    each = 0
    slack = 0
    wanted = 0
    if BALANCED and shares > 0:
        block = 0
        kv_head = program % KV_HEADS
        each, slack, wanted = part_size(
            num_seqs, splits, shares, filled, least, cu_seqlens_q, cu_seqlens_k, seq_lens, q_tokens, kv_tokens,
            max_rows, window_left, window_right, GROUP, RAGGED, PAGE, BLOCK_N, CHUNK, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        sequence, split = item_of(
            program // KV_HEADS, each, slack, wanted, limit, num_seqs, cu_seqlens_q, cu_seqlens_k, seq_lens,
            q_tokens, kv_tokens, max_rows, window_left, window_right, GROUP, RAGGED, PAGE, BLOCK_N, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
    else:
        # Heads of the same keys, which are neighbours in memory, are at work at once.
        kv_head = program % KV_HEADS
        split = program // KV_HEADS
        block = 0
        sequence = 0
        if tl.num_programs(0) > splits * KV_HEADS:
            block = split // splits
            split = split % splits
            sequence = block // row_blocks
            block = block % row_blocks
        if IN_TURN:
            entries = block_table + sequence.to(tl.int64) * stride_table
            coming = entries_of(entries, split * BLOCK_N, kv_tokens, PAGE, BLOCK_N)
    if BALANCED and sequence >= num_seqs:
        return
    q_start, q_len, kv_start, kv_len = sequence_bounds(
        sequence, cu_seqlens_q, cu_seqlens_k, seq_lens, q_tokens, kv_tokens, RAGGED, PAGE
    )
    if (block * BLOCK_M >= q_len * GROUP) | (q_len * GROUP > max_rows):
        return
    first = block * BLOCK_M // GROUP
    last = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP, q_len - 1)
    low, high = key_range(first, last, q_len, kv_len, window_left, window_right, HAS_LEFT, HAS_RIGHT, BLOCK_N)
    before = 0
    if BALANCED and shares > 0:
        blocks = tl.cdiv(high - low, BLOCK_N)
        used = parts_before_last(blocks, each, slack, limit) + 1
        keys_each = blocks_of_part(blocks, each, limit) * BLOCK_N
        split = tl.where(split < 0, used - 1, split)
        if used > 1:
            before = stored_before(
                sequence, each, slack, wanted, limit, num_seqs, cu_seqlens_q, cu_seqlens_k, seq_lens, q_tokens,
                kv_tokens, max_rows, window_left, window_right, GROUP, RAGGED, PAGE, BLOCK_N, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
    elif IN_TURN:
        used = splits_in_turn(low, high, splits, filled, CHUNK, FULL)
        keys_each = BLOCK_N
    else:
        used, keys_each = split_bounds(low, high, splits, BLOCK_N, CHUNK)
    if split >= used:
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
    acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    begin = low + split * keys_each
    end = tl.where(split == used - 1, high, begin + keys_each)
    stride = None
    if IN_TURN:
        stride = BLOCK_N
        if BALANCED and shares > 0:
            coming = entries_of(pages, begin, kv_len, PAGE, BLOCK_N)
        else:
            stride = used * BLOCK_N
            end = high
    elif AHEAD and PAGE > 0:
        coming = entries_of(pages, begin, kv_len, PAGE, BLOCK_N)
    acc, m, total = attend(
        acc, m, total, q0, q1, k, v, pages, position, begin, end, kv_len, last_page,
        scale, softcap, window_left, window_right,
        stride_kb, stride_kt, stride_kd, stride_vb, stride_vt, stride_vd,
        PAGE, D, D0, D1, DV, DV_PAD, BLOCK_N, True, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, FP8, NATIVE_FP8, PRECISION,
        coming, stride,
    )  # fmt: skip
    if used == 1:
        lse_offsets = (q_start + token) * stride_lt + head.to(tl.int64) * stride_lh
        if HAS_LSE and not RAGGED:
            lse += sequence.to(tl.int64) * stride_lb
        store_rows(
            acc, m, total, out, token.to(tl.int64) * stride_ot + head.to(tl.int64) * stride_oh, stride_od,
            lse, lse_offsets, sinks, head, valid, value_scale, DV, DV_PAD, HAS_SINKS, HAS_LSE,
        )  # fmt: skip
        return
    seen = total > 0.0
    dv = tl.arange(0, DV_PAD)
    stride_part = splits
    number = sequence * KV_HEADS + kv_head
    if BALANCED and shares > 0:
        stride_part = room
        number = kv_head
    part = (number.to(tl.int64) * max_rows + rows) * stride_part + before + split
    tl.store(
        part_out + part[:, None] * DV_PAD + dv[None, :],
        acc * (value_scale / tl.where(seen, total, 1.0))[:, None],
        mask=valid[:, None],
    )
    tl.store(part_lse + part, tl.where(seen, m + tl.log2(tl.where(seen, total, 1.0)), float("-inf")), mask=valid)
    if ROWS > 0 and merges != 0:
        tl.debug_barrier()  # one thread counts, after all have stored their elements
        counter = counters + (sequence * KV_HEADS + kv_head) * row_blocks + block
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == used - 1:
            tl.store(counter, 0)
            row = block * BLOCK_M + tl.arange(0, ROWS)
            its_token = row // GROUP
            its_head = kv_head * GROUP + row % GROUP
            there = its_token < q_len
            first_part = (number.to(tl.int64) * max_rows + row) * stride_part + before
            merged, best, weight = merged_rows(part_out, part_lse, first_part, there, used, ROWS, PARTS, DV_PAD)
            if HAS_LSE and not RAGGED:
                lse += sequence.to(tl.int64) * stride_lb
            store_rows(
                merged, best, weight, out,
                its_token.to(tl.int64) * stride_ot + its_head.to(tl.int64) * stride_oh, stride_od, lse,
                (q_start + its_token) * stride_lt + its_head.to(tl.int64) * stride_lh, sinks, its_head, there, 1.0,
                DV, DV_PAD, HAS_SINKS, HAS_LSE,
            )  # fmt: skip


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def merge_kernel(
    out,
    lse,
    part_out,
    part_lse,
    sinks,
    cu_seqlens_q,
    cu_seqlens_k,
    seq_lens,
    q_tokens,
    kv_tokens,
    max_rows,
    rows,
    splits,
    num_seqs,
    shares,
    filled,
    least,
    limit,
    room,
    window_left,
    window_right,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_od,
    stride_lb,
    stride_lh,
    stride_lt,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    RAGGED: tl.constexpr,
    PAGE: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    BALANCED: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    AHEAD: tl.constexpr,
    FULL: tl.constexpr,
):
    """One program per row of up to `rows`; PARTS parts at a time. Nothing to do where one split held all keys."""
    program = tl.program_id(0)
    row = program % rows
    kv_head = program // rows % KV_HEADS
    sequence = program // (rows * KV_HEADS)
    q_start, q_len, _, kv_len = sequence_bounds(
        sequence, cu_seqlens_q, cu_seqlens_k, seq_lens, q_tokens, kv_tokens, RAGGED, PAGE
    )
    token = row // GROUP
    if (token >= q_len) | (q_len * GROUP > max_rows):
        return
    block = row // BLOCK_M
    first = block * BLOCK_M // GROUP
    last = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP, q_len - 1)
    low, high = key_range(first, last, q_len, kv_len, window_left, window_right, HAS_LEFT, HAS_RIGHT, BLOCK_N)
    before = 0
    stride_part = splits
    number = sequence * KV_HEADS + kv_head
    if BALANCED and shares > 0:
        each, slack, wanted = part_size(
            num_seqs, splits, shares, filled, least, cu_seqlens_q, cu_seqlens_k, seq_lens, q_tokens, kv_tokens,
            max_rows, window_left, window_right, GROUP, RAGGED, PAGE, BLOCK_N, CHUNK, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        used = parts_before_last(tl.cdiv(high - low, BLOCK_N), each, slack, limit) + 1
        stride_part = room
        number = kv_head
        if used > 1:
            before = stored_before(
                sequence, each, slack, wanted, limit, num_seqs, cu_seqlens_q, cu_seqlens_k, seq_lens, q_tokens,
                kv_tokens, max_rows, window_left, window_right, GROUP, RAGGED, PAGE, BLOCK_N, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
    elif AHEAD and PAGE > 0 and not HAS_LEFT:
        used = splits_in_turn(low, high, splits, filled, CHUNK, FULL)
    else:
        used, _ = split_bounds(low, high, splits, BLOCK_N, CHUNK)
    if used == 1:
        return
    head = kv_head * GROUP + row % GROUP
    part = (number.to(tl.int64) * max_rows + row) * stride_part + before
    dv = tl.arange(0, DV_PAD)
    acc = tl.zeros([DV_PAD], tl.float32)
    m = float("-inf")
    total = 0.0
    for start in range(0, used, PARTS):
        s = start + tl.arange(0, PARTS)
        part_m = tl.load(part_lse + part + s, mask=s < used, other=float("-inf"))
        values = tl.load(part_out + (part + s)[:, None] * DV_PAD + dv[None, :], mask=(s < used)[:, None], other=0.0)
        m_new = tl.maximum(m, tl.max(part_m, 0))
        m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
        weights = tl.exp2(part_m - m_finite)
        rescale = tl.exp2(m - m_finite)
        acc = acc * rescale + tl.sum(values * weights[:, None], 0)
        total = total * rescale + tl.sum(weights, 0)
        m = m_new
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        m_new = tl.maximum(m, sink)
        m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
        rescale = tl.exp2(m - m_finite)
        acc = acc * rescale
        total = total * rescale + tl.exp2(sink - m_finite)
        m = m_new
    seen = total > 0.0
    safe_total = tl.where(seen, total, 1.0)
    out += (q_start + token).to(tl.int64) * stride_ot + head.to(tl.int64) * stride_oh
    if not RAGGED:
        out += sequence.to(tl.int64) * stride_ob
    tl.store(out + dv * stride_od, (acc / safe_total).to(out.dtype.element_ty), mask=dv < DV)
    if HAS_LSE:
        lse += (q_start + token) * stride_lt + head.to(tl.int64) * stride_lh
        if not RAGGED:
            lse += sequence.to(tl.int64) * stride_lb
        tl.store(lse, tl.where(seen, (m + tl.log2(safe_total)) * LN2, float("-inf")))
