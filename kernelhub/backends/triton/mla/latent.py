# mypy: ignore-errors
"""Latent attention with absorbed projections: one row of the cache is key and value of every head.

    attend:  program -> (tile of query rows, split)
             splits in use = enough for CHUNK keys each, at most `splits`; decided here, from the length
             for each block of keys: load the latents C [V, N] and rotary parts R [R, N] once,
                 s = Q_v C + Q_r R, mask, online softmax, acc = acc * rescale + p C^T
             store the normalised part and its log2-sum-exp, or the result where one split holds all keys
    merge:   program -> one row; weigh the parts by 2^(lse - max), add the sink, store

Rows are (query token, head), flattened, so a tile is full for any number of heads and tokens. With SPARSE each token
has keys of its own: a tile holds rows of one token, and its keys are the positions that `topk_indices` lists.

Tiles are counted over the whole batch, so that the parts take no more memory than there are rows: sequence by
sequence, or with RAGGED in a grid whose size does not depend on the lengths (`sequence_of`). Lengths are read
on the device. e4m3 is computed as in `kernelhub.backends.triton.attention.softmax`: in float16, and so are bfloat16
queries that meet it (HALF), each row divided by a power of two first. float16 ends at 2^-24, so where values are in it
weights are multiplied by WEIGHT_UNIT, 2^15, which the factor of the result makes up for: those down to 2^-39 of the
largest count.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.attention.softmax import page_of, sequence_of, store_rows, within
from kernelhub.backends.triton.attention.split_kv import split_bounds
from kernelhub.backends.triton.formats import LN2, LOG2E, e4m3_scaled

# Sizes that change from call to call, and operands that may begin anywhere; specialising on them would compile in
# the middle of a request.
_VARYING = [
    "num_seqs",
    "q_tokens",
    "topk",
    "splits",
    "room",
    "last_page",
    "stride_lb",
    "stride_lh",
    "stride_lt",
    "stride_table",
    "stride_it",
    "stride_ik",
]
_ANYWHERE = ["lse", "sinks", "kv_scale", "cu_seqlens_q", "block_table", "seq_lens", "topk_indices"]


@triton.jit
def sequence_holding(token, cu_seqlens_q, num_seqs):
    """The ragged sequence that a token of q belongs to; one past the last where it belongs to none."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q + middle + 1) <= token:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def tile_rows(
    tile,
    cu_seqlens_q,
    num_seqs,
    q_tokens,
    HEADS: tl.constexpr,
    RAGGED: tl.constexpr,
    SPARSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """(sequence, its first token in q, its tokens, first row of the tile, row past its last); rows of the sequence.

    `q_tokens` are those of a sequence, with RAGGED those of q. No row lies beyond them, whatever the offsets say.
    """
    q_start = tile * 0
    q_len = q_tokens
    if SPARSE:
        blocks: tl.constexpr = (HEADS + BLOCK_M - 1) // BLOCK_M
        token = tile // blocks
        if RAGGED:
            sequence = sequence_holding(token, cu_seqlens_q, num_seqs)
            if sequence < num_seqs:
                q_start, q_len = within(cu_seqlens_q, sequence, q_tokens)
            token -= q_start
        else:
            sequence = token // q_tokens
            token -= sequence * q_tokens
        first = token * HEADS + tile % blocks * BLOCK_M
        end = (token + 1) * HEADS
        if RAGGED:
            end = tl.where((sequence < num_seqs) & (token >= 0) & (token < q_len), end, 0)
            first = tl.maximum(first, 0)
    elif RAGGED:
        sequence, block = sequence_of(tile, cu_seqlens_q, num_seqs, HEADS, BLOCK_M)
        q_start, q_len = within(cu_seqlens_q, sequence, q_tokens)
        first = tl.maximum(block, 0) * BLOCK_M
        end = tl.where(block < 0, 0, q_len * HEADS)
    else:
        blocks = (q_tokens * HEADS + BLOCK_M - 1) // BLOCK_M
        sequence = tile // blocks
        first = tile % blocks * BLOCK_M
        end = q_tokens * HEADS
    return sequence, q_start, q_len, first, end


@triton.jit
def keys_seen(
    first,
    end,
    q_len,
    kv_len,
    topk,
    HEADS: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPARSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Keys, or places in the list of positions, that some row of a tile may see: those before this."""
    if SPARSE:
        return topk
    high = kv_len
    if CAUSAL:
        last = (tl.minimum(first + BLOCK_M, end) - 1) // HEADS
        high = tl.maximum(kv_len - q_len + last + 1, 0)
    return high


@triton.jit
def load_latent_queries(
    q,
    row_offsets,
    valid,
    stride_qd,
    score_scale,
    V: tl.constexpr,
    V_PAD: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    HALF: tl.constexpr,
):
    """The two parts [M, V_PAD] and [M, R_PAD] of a tile of queries, and the factor of their scores, [M, 1] with HALF.

    HALF: bfloat16 queries become float16, each row divided by the power of two of its largest element first.
    """
    rows = (q + row_offsets)[:, None]
    dv = tl.arange(0, V_PAD)[None, :]
    qv = tl.load(rows + dv * stride_qd, mask=valid[:, None] & (dv < V), other=0.0)
    qr = qv
    if R > 0:
        dr = tl.arange(0, R_PAD)[None, :]
        qr = tl.load(rows + (V + dr) * stride_qd, mask=valid[:, None] & (dr < R), other=0.0)
    factor = score_scale
    if HALF:
        largest = tl.max(tl.abs(qv.to(tl.float32)), 1)
        if R > 0:
            largest = tl.maximum(largest, tl.max(tl.abs(qr.to(tl.float32)), 1))
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        power = tl.where(power > 0, power, 1.0)
        qv = (qv.to(tl.float32) / power[:, None]).to(tl.float16)
        qr = (qr.to(tl.float32) / power[:, None]).to(tl.float16)
        factor = (score_scale * power)[:, None]
    return qv, qr, factor


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def latent_kernel(
    q,
    kv_cache,
    out,
    lse,
    part_out,
    part_lse,
    sinks,
    kv_scale,
    cu_seqlens_q,
    block_table,
    seq_lens,
    topk_indices,
    score_scale,
    value_scale,
    num_seqs,
    q_tokens,
    topk,
    splits,
    room,
    last_page,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_qd,
    stride_kp,
    stride_kt,
    stride_kd,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_od,
    stride_lb,
    stride_lh,
    stride_lt,
    stride_table,
    stride_it,
    stride_ik,
    HEADS: tl.constexpr,
    RAGGED: tl.constexpr,
    SPARSE: tl.constexpr,
    CAUSAL: tl.constexpr,
    PAGE: tl.constexpr,
    V: tl.constexpr,
    V_PAD: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    HALF: tl.constexpr,
    SCALE_ON_DEVICE: tl.constexpr,
    APART: tl.constexpr,
    WEIGHT_UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per split of a tile. No sequence has more keys than `room`, what a row of the table has pages for.

    No page past `last_page` is read. R is the rotary width, 0 for none. APART: the two products of the scores are not
    summed in one accumulator.
    """
    program = tl.program_id(0)
    split = program % splits
    tile = program // splits
    sequence, q_start, q_len, first, end = tile_rows(
        tile, cu_seqlens_q, num_seqs, q_tokens, HEADS, RAGGED, SPARSE, BLOCK_M
    )
    if first >= end:
        return
    kv_len = tl.minimum(tl.maximum(tl.load(seq_lens + sequence), 0), room)
    high = keys_seen(first, end, q_len, kv_len, topk, HEADS, CAUSAL, SPARSE, BLOCK_M)
    used, keys_each = split_bounds(0, high, splits, BLOCK_N, CHUNK)
    if split >= used:
        return

    q += q_start.to(tl.int64) * stride_qt
    out += q_start.to(tl.int64) * stride_ot
    if not RAGGED:
        q += sequence.to(tl.int64) * stride_qb
        out += sequence.to(tl.int64) * stride_ob
    pages = block_table + sequence.to(tl.int64) * stride_table
    listed = topk_indices
    if SPARSE:
        index = q_start + first // HEADS
        if not RAGGED:
            index += sequence * q_tokens
        listed += index.to(tl.int64) * stride_it
    if SCALE_ON_DEVICE:
        factor_of_cache = tl.load(kv_scale)
        score_scale *= factor_of_cache
        value_scale *= factor_of_cache

    rows = first + tl.arange(0, BLOCK_M)
    valid = rows < end
    token = rows // HEADS
    head = rows % HEADS
    position = kv_len - q_len + token
    qv, qr, factor = load_latent_queries(
        q,
        token.to(tl.int64) * stride_qt + head.to(tl.int64) * stride_qh,
        valid,
        stride_qd,
        score_scale,
        V,
        V_PAD,
        R,
        R_PAD,
        HALF,
    )
    acc = tl.zeros([BLOCK_M, V_PAD], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    dv = tl.arange(0, V_PAD)[:, None]
    dr = tl.arange(0, R_PAD)[:, None]
    n_range = tl.arange(0, BLOCK_N)
    begin = split * keys_each
    for start in tl.range(begin, tl.minimum(begin + keys_each, high), BLOCK_N):
        n = start + n_range
        if SPARSE:
            key = tl.load(listed + n.to(tl.int64) * stride_ik, mask=n < topk, other=-1)
            inside = (key >= 0) & (key < kv_len)
        else:
            key = n
            inside = n < kv_len
        page = page_of(pages + key // PAGE, inside, last_page, True)
        cached = (kv_cache + page * stride_kp + (key % PAGE).to(tl.int64) * stride_kt)[None, :]
        if V_PAD > V:
            latent = tl.load(cached + dv * stride_kd, mask=inside[None, :] & (dv < V), other=0)
        else:
            latent = tl.load(cached + dv * stride_kd, mask=inside[None, :], other=0)
        if FP8:
            latent = e4m3_scaled(latent, qv.dtype, NATIVE_FP8)
        s = tl.dot(qv, latent, input_precision=PRECISION)
        if R > 0:
            rotary = tl.load(cached + (V + dr) * stride_kd, mask=inside[None, :] & (dr < R), other=0)
            if FP8:
                rotary = e4m3_scaled(rotary, qv.dtype, NATIVE_FP8)
            if APART:
                s = s * factor + tl.dot(qr, rotary, input_precision=PRECISION) * factor
            else:
                s = tl.dot(qr, rotary, acc=s, input_precision=PRECISION) * factor
        else:
            s = s * factor
        seen = inside[None, :]
        if CAUSAL:
            seen = seen & (key[None, :] <= position[:, None])
        s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - m_finite[:, None])
        rescale = tl.exp2(m - m_finite)
        total = total * rescale + tl.sum(p, 1)
        if WEIGHT_UNIT > 1:
            p *= WEIGHT_UNIT
        acc = tl.dot(p.to(latent.dtype), tl.trans(latent), acc=acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    if used == 1:
        if HAS_LSE and not RAGGED:
            lse += sequence.to(tl.int64) * stride_lb
        store_rows(
            acc, m, total, out, token.to(tl.int64) * stride_ot + head.to(tl.int64) * stride_oh, stride_od,
            lse, (q_start + token) * stride_lt + head.to(tl.int64) * stride_lh, sinks, head, valid, value_scale,
            V, V_PAD, HAS_SINKS, HAS_LSE,
        )  # fmt: skip
        return
    any_key = total > 0.0
    part = (tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)) * splits + split
    tl.store(
        part_out + part[:, None] * V_PAD + tl.arange(0, V_PAD)[None, :],
        acc * (value_scale / tl.where(any_key, total, 1.0))[:, None],
        mask=valid[:, None],
    )
    tl.store(part_lse + part, tl.where(any_key, m + tl.log2(tl.where(any_key, total, 1.0)), float("-inf")), mask=valid)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def merge_latent_kernel(
    out,
    lse,
    part_out,
    part_lse,
    sinks,
    cu_seqlens_q,
    seq_lens,
    num_seqs,
    q_tokens,
    topk,
    splits,
    room,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_od,
    stride_lb,
    stride_lh,
    stride_lt,
    HEADS: tl.constexpr,
    RAGGED: tl.constexpr,
    SPARSE: tl.constexpr,
    CAUSAL: tl.constexpr,
    V: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """One program per row; PARTS parts at a time. Where one split held all keys there is nothing to do."""
    program = tl.program_id(0)
    tile = program // BLOCK_M
    sequence, q_start, q_len, first, end = tile_rows(
        tile, cu_seqlens_q, num_seqs, q_tokens, HEADS, RAGGED, SPARSE, BLOCK_M
    )
    row = first + program % BLOCK_M
    if row >= end:
        return
    kv_len = tl.minimum(tl.maximum(tl.load(seq_lens + sequence), 0), room)
    high = keys_seen(first, end, q_len, kv_len, topk, HEADS, CAUSAL, SPARSE, BLOCK_M)
    used, _ = split_bounds(0, high, splits, BLOCK_N, CHUNK)
    if used == 1:
        return
    token = row // HEADS
    head = row % HEADS
    part = program.to(tl.int64) * splits
    dv = tl.arange(0, V_PAD)
    acc = tl.zeros([V_PAD], tl.float32)
    m = float("-inf")
    total = 0.0
    for start in range(0, used, PARTS):
        s = start + tl.arange(0, PARTS)
        part_m = tl.load(part_lse + part + s, mask=s < used, other=float("-inf"))
        values = tl.load(part_out + (part + s)[:, None] * V_PAD + dv[None, :], mask=(s < used)[:, None], other=0.0)
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
    any_key = total > 0.0
    safe_total = tl.where(any_key, total, 1.0)
    out += (q_start + token).to(tl.int64) * stride_ot + head.to(tl.int64) * stride_oh
    if not RAGGED:
        out += sequence.to(tl.int64) * stride_ob
    tl.store(out + dv * stride_od, (acc / safe_total).to(out.dtype.element_ty), mask=dv < V)
    if HAS_LSE:
        lse += (q_start + token) * stride_lt + head.to(tl.int64) * stride_lh
        if not RAGGED:
            lse += sequence.to(tl.int64) * stride_lb
        tl.store(lse, tl.where(any_key, (m + tl.log2(safe_total)) * LN2, float("-inf")))
