# mypy: ignore-errors
"""The device code that the attention kernels share: one tile of queries over a range of keys.

Rows of a tile are (query token, query head of the group), flattened: row r is token r // GROUP and
head r % GROUP of one KV head. So a tile is full for any ratio of heads, and decode of several query heads is
one matrix product.

For a tile Q and keys n in a range, block by block (online softmax, Milakov and Gimelshein 2018; Dao 2023):

    s = Q K^T, softcap, mask
    m' = max(m, scale * max_n s)                in units of log2
    p = 2^(scale * s - m')                      in float16 2^15 times that: m' is 15 less
    total = total * 2^(m - m') + sum_n p
    acc = acc * 2^(m - m') + p V

Keys are addressed by pointers and masks only. PAGE is the page size, or 0 where tokens are adjacent.

e4m3 and e5m2 keys and values become float16, which holds them exactly and costs a quarter of the conversions that
bfloat16 would. So do the queries, each row divided by the power of two of its largest element first: exact
down to 2^-24 of that element, and in range for any queries.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.formats import LN2, LOG2E, e4m3_scaled, e5m2_to_float

COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def tanh(x):
    """tanh without libdevice, exact at both ends."""
    e = tl.exp2(tl.abs(x) * (2.0 * LOG2E))
    t = 1.0 - 2.0 / (e + 1.0)
    return tl.where(x < 0, -t, t)


@triton.jit
def sequence_of(block, cu_seqlens_q, num_seqs, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The ragged sequence that row block `block` of a static grid belongs to, and its place in it.

    Sequence i is given the blocks from cu[i] * GROUP // BLOCK_M + i on, which is never too few, so the grid
    has a size that the host knows without the lengths. A place past the sequence's end has no rows.
    """
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        first = tl.load(cu_seqlens_q + middle) * GROUP // BLOCK_M + middle
        if first <= block:
            low = middle + 1
        else:
            high = middle
    sequence = tl.maximum(low - 1, 0)
    first = tl.load(cu_seqlens_q + sequence) * GROUP // BLOCK_M + sequence
    return sequence, block - first


@triton.jit
def sequence_bounds(
    sequence,
    cu_seqlens_q,
    cu_seqlens_k,
    seq_lens,
    q_tokens,
    kv_tokens,
    RAGGED: tl.constexpr,
    PAGE: tl.constexpr,
):
    """(first query, queries, first key, keys) of a sequence; the firsts are 0 in batched tensors and pages.

    `q_tokens` and `kv_tokens` are those of a sequence in batched tensors, of all of them in ragged ones, and of pages
    what a row of the block table has room for. Nothing beyond them is given out, whatever offsets and lengths say.
    """
    q_start = sequence * 0
    kv_start = sequence * 0
    q_len = q_tokens
    kv_len = kv_tokens
    if RAGGED:
        q_start, q_len = within(cu_seqlens_q, sequence, q_tokens)
    if PAGE > 0:
        kv_len = tl.minimum(tl.maximum(tl.load(seq_lens + sequence), 0), kv_tokens)
    elif RAGGED:
        kv_start, kv_len = within(cu_seqlens_k, sequence, kv_tokens)
    return q_start, q_len, kv_start, kv_len


@triton.jit
def within(offsets, sequence, tokens):
    """(first token, tokens) of a sequence, cut to the tokens that there are."""
    start = tl.minimum(tl.maximum(tl.load(offsets + sequence), 0), tokens)
    end = tl.minimum(tl.load(offsets + sequence + 1), tokens)
    return start, tl.maximum(end - start, 0)


@triton.jit
def page_of(places, inside, last_page, MASKED: tl.constexpr):
    """Pages that entries of a block table name, as places in the cache; the last one for what names none of it.

    So a wrong entry costs a wrong result, and no address outside of the cache, for one more operation on as many
    numbers as there are keys. KERNELHUB_CHECK=1 names the entry.
    """
    if MASKED:
        page = tl.load(places, mask=inside, other=0)
    else:
        page = tl.load(places)
    return place_of(page, last_page)


@triton.jit
def place_of(page, last_page):
    """Entries of a block table as places in the cache; the last one for what names none of it."""
    # Without a sign an entry below 0 is a large one.
    return tl.minimum(page.to(tl.uint32, bitcast=True), last_page.to(tl.uint32)).to(tl.int64)


@triton.jit
def entries_of(pages, start, bound, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Entries of a row of the block table for the keys of a block, those below `bound`."""
    n = start + tl.arange(0, BLOCK_N)
    return tl.load(pages + n // PAGE, mask=n < bound, other=0)


@triton.jit
def key_range(
    first_token,
    last_token,
    q_len,
    kv_len,
    window_left,
    window_right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Keys [low, high) that some query of the tokens sees, low rounded down to a block."""
    low = 0
    high = kv_len
    offset = kv_len - q_len
    if HAS_LEFT:
        low = tl.maximum(offset + first_token - window_left, 0) // BLOCK_N * BLOCK_N
    if HAS_RIGHT:
        high = tl.minimum(offset + last_token + window_right + 1, kv_len)
    return low, tl.maximum(high, low)


@triton.jit
def _decoded(raw, dtype: tl.constexpr, FP8: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Bytes of keys or values as `dtype`: of e4m3 (FP8 is 1), over 256 unless NATIVE_FP8, or of e5m2 (FP8 is 2)."""
    if FP8 == 2:
        return e5m2_to_float(raw, dtype)
    else:  # noqa: RET505  a static branch: both would be compiled without it, and sm_80 has no e4m3
        return e4m3_scaled(raw, dtype, NATIVE_FP8)


@triton.jit
def kept(x):
    """The same float16, through assembler that the compiler does not look into.

    Without it the bytes of values go through shared memory, where mma.sync wants columns: each thread loads them one by
    one, then converts them. So numbers do, which ldmatrix transposes: two thirds of the instructions, and registers for
    three programs on a multiprocessor of sm_90 instead of two.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float16, is_pure=False, pack=2)


@triton.jit
def attend(
    acc,
    m,
    total,
    q0,
    q1,
    k,
    v,
    pages,
    position,
    low,
    high,
    kv_len,
    last_page,
    scale,
    softcap,
    window_left,
    window_right,
    stride_kp,
    stride_kt,
    stride_kd,
    stride_vp,
    stride_vt,
    stride_vd,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    coming=None,
    stride=None,
):
    """Go over keys [low, high) and update (acc, m, total).

    q0 [M, D0] and q1 [M, D1] are the two parts of the queries' width (D1 is 0 if one part holds it all),
    `position` [M] where each row stands among the keys, `scale` the positive factor of the scores (in units of
    log2 unless they are capped), one per row with FP8. `k` and `v` point at the first token of the KV head
    (or at the head in page 0), `pages` at the sequence's row of the block table, of whose entries none is
    followed past `last_page`. With MASKED false, every row sees every key.

    `coming` are the entries of the first block, if they are read a block ahead: so the keys of two blocks are under way
    at once, which needs more memory, and without waiting for entries between them. `stride` is how many keys the blocks
    are apart, if not BLOCK_N.
    """
    d0 = tl.arange(0, D0)
    dv = tl.arange(0, DV_PAD)
    n_range = tl.arange(0, BLOCK_N)
    factor = scale
    if FP8:
        factor = scale[:, None]
    step = BLOCK_N if stride is None else stride
    for start in tl.range(low, high, step):
        n = start + n_range
        inside = n < kv_len
        if PAGE == 0:
            k_token = n.to(tl.int64) * stride_kt
            v_token = n.to(tl.int64) * stride_vt
        else:
            if coming is None:
                page = page_of(pages + n // PAGE, inside, last_page, MASKED)
            else:
                page = place_of(coming, last_page)
                coming = entries_of(pages, start + step, kv_len, PAGE, BLOCK_N)
            k_token = page * stride_kp + (n % PAGE) * stride_kt
            v_token = page * stride_vp + (n % PAGE) * stride_vt
        k_rows = k + k_token
        if D0 > D:
            k0 = tl.load(k_rows[None, :] + d0[:, None] * stride_kd, mask=(d0 < D)[:, None] & inside[None, :], other=0)
        elif MASKED:
            k0 = tl.load(k_rows[None, :] + d0[:, None] * stride_kd, mask=inside[None, :], other=0)
        else:
            k0 = tl.load(k_rows[None, :] + d0[:, None] * stride_kd)
        if FP8:
            k0 = _decoded(k0, q0.dtype, FP8, NATIVE_FP8)
        s = tl.dot(q0, k0, input_precision=PRECISION)
        if D1 > 0:
            d1 = D0 + tl.arange(0, D1)
            k1 = tl.load(k_rows[None, :] + d1[:, None] * stride_kd, mask=(d1 < D)[:, None] & inside[None, :], other=0)
            if FP8:
                k1 = _decoded(k1, q0.dtype, FP8, NATIVE_FP8)
            s = tl.dot(q1, k1, acc=s, input_precision=PRECISION)
        if HAS_SOFTCAP:
            s = softcap * LOG2E * tanh(s * (factor / softcap))
        if MASKED:
            seen = inside[None, :]
            if HAS_LEFT:
                seen = seen & (n[None, :] >= position[:, None] - window_left)
            if HAS_RIGHT:
                seen = seen & (n[None, :] <= position[:, None] + window_right)
            s = tl.where(seen, s, float("-inf"))
        best = tl.max(s, 1)
        if not HAS_SOFTCAP:
            best *= scale
        if q0.dtype == tl.float16:
            best = tl.where(tl.abs(best) < 1048576.0, best - 15.0, best)
        m_new = tl.maximum(m, best)
        if HAS_SOFTCAP:
            m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(s - m_finite[:, None])
        else:
            m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(s * factor - m_finite[:, None])
        rescale = tl.exp2(m - m_finite)
        total = total * rescale + tl.sum(p, 1)
        v_rows = v + v_token
        if DV_PAD > DV:
            v_block = tl.load(
                v_rows[:, None] + dv[None, :] * stride_vd, mask=(dv < DV)[None, :] & inside[:, None], other=0
            )
        elif MASKED:
            v_block = tl.load(v_rows[:, None] + dv[None, :] * stride_vd, mask=inside[:, None], other=0)
        else:
            v_block = tl.load(v_rows[:, None] + dv[None, :] * stride_vd)
        if FP8:
            v_block = _decoded(v_block, q0.dtype, FP8, NATIVE_FP8)
            if COMPILED and q0.shape[0] < 64 and v_block.dtype == tl.float16:
                v_block = kept(v_block)
        acc = tl.dot(p.to(v_block.dtype), v_block, acc=acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    return acc, m, total


@triton.jit
def load_queries(
    q,
    row_offsets,
    valid,
    stride_qd,
    score_scale,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    FP8: tl.constexpr,
    SIGN: tl.constexpr,
):
    """The two parts [M, D0] and [M, D1] of a tile of queries, and the factor of their scores, [M] with FP8.

    The second part is the first where D1 is 0. The factor is positive: the sign of `score_scale`, or its
    being 0, goes into the queries. SIGN is that sign where it is known beforehand, which without FP8 it is: so
    queries whose scores have a positive factor stay as they were loaded, in shared memory.
    """
    rows = q + row_offsets
    d0 = tl.arange(0, D0)
    q0 = tl.load(rows[:, None] + d0[None, :] * stride_qd, mask=valid[:, None] & (d0 < D)[None, :], other=0.0)
    q1 = q0
    if D1 > 0:
        d1 = D0 + tl.arange(0, D1)
        q1 = tl.load(rows[:, None] + d1[None, :] * stride_qd, mask=valid[:, None] & (d1 < D)[None, :], other=0.0)
    scale = tl.where(score_scale == 0, 1.0, tl.abs(score_scale))
    if FP8:
        sign = tl.where(score_scale > 0, 1.0, tl.where(score_scale < 0, -1.0, 0.0))
        power = tl.full(row_offsets.shape, 1.0, tl.float32)
        if q0.dtype == tl.bfloat16:
            largest = tl.max(tl.abs(q0.to(tl.float32)), 1)
            if D1 > 0:
                largest = tl.maximum(largest, tl.max(tl.abs(q1.to(tl.float32)), 1))
            power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
            power = tl.where(power > 0, power, 1.0)
        dtype: tl.constexpr = tl.float32 if q0.dtype == tl.float32 else tl.float16
        q0 = (q0.to(tl.float32) * (sign / power)[:, None]).to(dtype)
        q1 = (q1.to(tl.float32) * (sign / power)[:, None]).to(dtype)
        scale = scale * power
    elif SIGN < 1:
        q0 = (q0.to(tl.float32) * SIGN).to(q0.dtype)
        q1 = (q1.to(tl.float32) * SIGN).to(q1.dtype)
    return q0, q1, scale


@triton.jit
def store_rows(
    acc,
    m,
    total,
    out,
    out_offsets,
    stride_od,
    lse,
    lse_offsets,
    sinks,
    head,
    valid,
    value_scale,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Finish a tile: the sink's share of the denominator, the division, the LSE."""
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
        m_new = tl.maximum(m, sink)
        m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
        rescale = tl.exp2(m - m_finite)
        total = total * rescale + tl.exp2(sink - m_finite)
        acc = acc * rescale[:, None]
        m = m_new
    acc = acc * (value_scale / tl.where(total > 0.0, total, 1.0))[:, None]
    dv = tl.arange(0, DV_PAD)
    tl.store(
        (out + out_offsets)[:, None] + dv[None, :] * stride_od,
        acc.to(out.dtype.element_ty),
        mask=valid[:, None] & (dv < DV)[None, :],
    )
    if HAS_LSE:
        value = tl.where(total > 0.0, (m + tl.log2(tl.where(total > 0.0, total, 1.0))) * LN2, float("-inf"))
        tl.store(lse + lse_offsets, value, mask=valid)
