# mypy: ignore-errors
"""Decode of latent attention over pages of 64 tokens, for sm_90: 64 rows of queries, two warpgroups, four loaders.

Rows are (query token, head) of a sequence, flattened. Pages come in pairs. Warpgroup 0 scores the even page and holds
the left 256 columns of the sums, warpgroup 1 the odd page and the right 256. Each hands its probabilities to the other
through shared memory, so one softmax runs while the other warpgroup multiplies:

    0: m0 = max(m1, max S0), alpha = 2^(m1 - m0)          -> M_READY
    1: m1 = max(m0, max S1), beta  = 2^(m0 - m1)          -> BETA_READY;  P1 -> ODD_READY
    0: left  = left * alpha + P0 V0l;  P0 * beta          -> EVEN_READY;  left = left * beta + P1 V1l
    1: right = right * alpha * beta + P1 V1r + (P0 beta) V0r

A page is loaded in two halves. Left halves are released by warpgroup 0 and right ones by warpgroup 1, the last to read
them, and each of the four buffers has a loading warp of its own. P1 takes the memory of the queries' rotary part, which
is in registers by then.

Programs walk the sequences together, by a schedule that each computes from the lengths (`schedule.py`). What a page
holds past a sequence's end may be NaN: those scores are masked, and those rows of the values are cleared.

Source: the seesaw schedule is FlashMLA's (DeepSeek 2025).
"""

from __future__ import annotations

from kernelhub.backends.gluon.language import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from kernelhub.backends.gluon.mla.schedule import part_of_program, segment

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
# Below every score, and finite: 2^(-inf - LEAST) is 0, so a row that sees no key has sums of 0.
LEAST = gl.constexpr(-1e30)
S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
O_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16]))
P_LAYOUT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2))
QR_LAYOUT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=S_LAYOUT, k_width=2))
ROW_S = gl.constexpr(gl.SliceLayout(1, S_LAYOUT))
ROW_O = gl.constexpr(gl.SliceLayout(1, O_LAYOUT))
COL_S = gl.constexpr(gl.SliceLayout(0, S_LAYOUT))
COL_O = gl.constexpr(gl.SliceLayout(0, O_LAYOUT))
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PIECES = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
PIECE_ROWS = gl.constexpr(gl.SliceLayout(1, PIECES))
# Signals between the warpgroups, and the vectors that they pass.
M_READY, BETA_READY, EVEN_READY, ODD_READY, SUMS_READY = map(gl.constexpr, range(5))
M0, ALPHA, BETA, M1 = map(gl.constexpr, range(4))
# How keys come into shared memory where TMA does not load them: rows that lists name by cp.async, or by threads, as
# float16 of float8; and pages in the latter way.
GATHERED, CONVERTED, CONVERTED_PAGES = map(gl.constexpr, (1, 2, 3))


@gluon.jit
def load_queries(q_half, q_rest, row, full, left, right, rope):
    """The rows of queries from `row` on: both halves of their latents, and the rotary part."""
    mbarrier.expect(full, q_half.block_type.nbytes * 2 + q_rest.block_type.nbytes)
    tma_load(q_half, [row, 0], full, left.index(0))
    tma_load(q_half, [row, 256], full, right.index(0))
    tma_load(q_rest, [row, 512], full, rope)


@gluon.jit
def load_pages(
    q_half, q_rope, kv_piece, q_buf_left, q_buf_right, q_buf_rope, buf, rope_buf, full_q, empty_q, full, empty,
    block_table, seq_lens, q_row, q_rows, stride_table, page_rows, num_rows, last_page, room, begin, end, first, last,
    first_at, ODD: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """Fill one of the four buffers with halves of pages, and for the left half of odd pages the queries too."""
    done = 0
    walked = 0
    at = first_at
    for sequence in range(first, last):
        kv_len, low, high, at = segment(seq_lens, sequence, at, begin, end, room)
        if low < high:
            if ODD and not RIGHT:
                mbarrier.wait(empty_q, (walked & 1) ^ 1)
                row = sequence * q_rows + q_row
                load_queries(q_half, q_rope, row, full_q, q_buf_left, q_buf_right, q_buf_rope)
            pages = block_table + sequence.to(gl.int64) * stride_table
            count = (kv_len + 63) // 64
            for pair in range(low, high):
                index = pair * 2 + ODD
                row = num_rows  # an odd page past the end: TMA fills it with zeros
                if index < count:
                    page = gl.minimum(gl.maximum(gl.load(pages + index), 0), last_page)
                    row = page * page_rows
                mbarrier.wait(empty, (done & 1) ^ 1)
                for piece in gl.static_range(4):
                    mbarrier.expect(full.index(piece), kv_piece.block_type.nbytes)
                    tma_load(
                        kv_piece, [row, RIGHT * 256 + piece * 64], full.index(piece), buf.slice(piece * 64, 64, dim=1)
                    )
                if RIGHT:
                    mbarrier.expect(full.index(4), kv_piece.block_type.nbytes)
                    tma_load(kv_piece, [row, 512], full.index(4), rope_buf)
                done += 1
            walked += 1


@gluon.jit
def score_half(q_half, k_half, full, s, phase, USE: gl.constexpr, LISTED: gl.constexpr):
    """Add the products of half of the latent to scores, 64 columns at a time as they arrive."""
    for piece in gl.static_range(4):
        mbarrier.wait(full.index(piece), phase)
        if LISTED == GATHERED:
            fence_async_shared()  # on this side: the copies ended on their own
        q = q_half.slice(piece * 64, 64, dim=1)
        k = k_half.slice(piece * 64, 64, dim=1)
        if USE or piece > 0:
            s = warpgroup_mma(q, k.permute((1, 0)), s, is_async=True)
        else:
            s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
    return s


@gluon.jit
def score(
    q_left, q_right, qr, k_left, k_right, k_rope, full_l, full_r, done, ODD: gl.constexpr, LISTED: gl.constexpr
):  # fmt: skip
    """The scores of a page, issued as its pieces arrive and not waited for; the half that is released first, first."""
    phase = done & 1
    none = done >> 24  # 0, but no constant: the assembler would keep 36 addresses in registers, and spill
    s = gl.zeros((64, 64), gl.float32, S_LAYOUT)
    if ODD:
        s = score_half(q_right.index(none), k_right.index(1 + none), full_r, s, phase, False, LISTED)
        mbarrier.wait(full_r.index(4), phase)
        if LISTED == GATHERED:
            fence_async_shared()
        s = warpgroup_mma(qr, k_rope.index(1 + none).permute((1, 0)), s, is_async=True)
        s = score_half(q_left.index(none), k_left.index(1 + none), full_l, s, phase, True, LISTED)
    else:
        s = score_half(q_left.index(none), k_left.index(none), full_l, s, phase, False, LISTED)
        s = score_half(q_right.index(none), k_right.index(none), full_r, s, phase, True, LISTED)
        mbarrier.wait(full_r.index(4), phase)
        if LISTED == GATHERED:
            fence_async_shared()
        s = warpgroup_mma(qr, k_rope.index(none).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def scaled(
    s, scale, key, kv_len, position, unseen, hidden, hidden_ready, done, ODD: gl.constexpr, CAUSAL: gl.constexpr,
    MASK: gl.constexpr, LISTED: gl.constexpr,
):  # fmt: skip
    """Scores of the 64 keys from `key` on in units of log2; -inf where a row does not see a key.

    `unseen` is the first key that some row does not see. Lists: `hidden` is -inf for each key that no row sees.
    """
    if LISTED >= CONVERTED:
        x = s * (scale * hidden.index(2).load(ROW_S))[:, None]
    else:
        x = s * scale
    if LISTED and LISTED < CONVERTED_PAGES:
        mbarrier.wait(hidden_ready.index(ODD), done & 1)
        x = x + hidden.index(ODD).load(COL_S)[None, :]
    elif MASK:  # noqa: SIM102  known when it is compiled
        if key + 64 > unseen:
            column = key + gl.arange(0, 64, COL_S)
            if CAUSAL:
                x = gl.where(column[None, :] <= position[:, None], x, float("-inf"))
            else:
                x = gl.where((column < kv_len)[None, :], x, float("-inf"))
    return x


@gluon.jit
def clear_from(buf, limit):
    """Write zeros into the rows of a half of a page from `limit` on, where the page has rows before that."""
    if (limit > 0) & (limit < 64):
        for piece in gl.static_range(4):
            rows = piece * 16 + gl.arange(0, 16, PIECE_ROWS)
            part = buf.slice(piece * 16, 16)
            value = part.load(PIECES)
            part.store(gl.where((rows < limit)[:, None], value, gl.zeros_like(value)))
        fence_async_shared()


@gluon.jit
def even_and_odd(bufs, done, LISTED: gl.constexpr):
    """Both buffers; of converted pages not at constant places, as in `score`."""
    none = done >> 24
    if LISTED == CONVERTED_PAGES:
        even = bufs.index(none)
        odd = bufs.index(1 + none)
    else:
        even = bufs.index(0)
        odd = bufs.index(1)
    return even, odd


@gluon.jit
def step_even(
    x, acc, m, total, p_even, p_odd, k_left, vecs, bars, empty_l, done, tail, LAST: gl.constexpr, LISTED: gl.constexpr
):  # fmt: skip
    """A pair of pages, for warpgroup 0; the last product is under way.

    `tail`: tokens of the sequence from this pair on. LAST: the pair may hold the sequence's end.
    """
    phase = done & 1
    even, odd = even_and_odd(k_left, done, LISTED)
    m0 = gl.maximum(m, gl.max(x, 1))
    alpha = gl.exp2(m - m0)
    vecs.index(M0).store(m0)
    vecs.index(ALPHA).store(alpha)
    mbarrier.arrive(bars.index(M_READY), count=1)
    p = gl.exp2(x - m0[:, None])
    total = total * alpha + gl.sum(p, 1)
    if LAST:
        clear_from(k_left.index(0), tail)
    pending = warpgroup_mma(
        gl.convert_layout(p.to(k_left.dtype), P_LAYOUT),
        even,
        acc * gl.convert_layout(alpha, ROW_O)[:, None],
        is_async=True,
    )
    mbarrier.wait(bars.index(BETA_READY), phase)
    beta = vecs.index(BETA).load(ROW_S)
    m1 = vecs.index(M1).load(ROW_S)
    p_even.store((p * beta[:, None]).to(k_left.dtype))
    fence_async_shared()
    mbarrier.arrive(bars.index(EVEN_READY), count=1)
    acc = warpgroup_mma_wait(0, deps=(pending,))
    mbarrier.arrive(empty_l.index(0), count=1)
    acc = acc * gl.convert_layout(beta, ROW_O)[:, None]
    mbarrier.wait(bars.index(ODD_READY), phase)
    if LAST:
        clear_from(k_left.index(1), tail - 64)  # warpgroup 1 has scored it
    return warpgroup_mma(p_odd, odd, acc, is_async=True), m1, total * beta


@gluon.jit
def step_odd(
    x, acc, total, p_even, p_odd, k_right, vecs, bars, empty_r, done, tail, LAST: gl.constexpr, LISTED: gl.constexpr
):  # fmt: skip
    """The same for warpgroup 1; all its products are done."""
    phase = done & 1
    even, odd = even_and_odd(k_right, done, LISTED)
    top = gl.max(x, 1)
    mbarrier.wait(bars.index(M_READY), phase)
    m0 = vecs.index(M0).load(ROW_S)
    alpha = vecs.index(ALPHA).load(ROW_S)
    m1 = gl.maximum(m0, top)
    beta = gl.exp2(m0 - m1)
    vecs.index(BETA).store(beta)
    vecs.index(M1).store(m1)
    mbarrier.arrive(bars.index(BETA_READY), count=1)
    p = gl.exp2(x - m1[:, None])
    factor = alpha * beta
    total = total * factor + gl.sum(p, 1)
    half = p.to(k_right.dtype)
    p_odd.store(half)
    fence_async_shared()
    mbarrier.arrive(bars.index(ODD_READY), count=1)
    if LAST:
        clear_from(k_right.index(0), tail)  # warpgroup 0 has scored it
        clear_from(k_right.index(1), tail - 64)
    first = warpgroup_mma(
        gl.convert_layout(half, P_LAYOUT),
        odd,
        acc * gl.convert_layout(factor, ROW_O)[:, None],
        is_async=True,
    )
    mbarrier.wait(bars.index(EVEN_READY), phase)
    second = warpgroup_mma(p_even, even, first, is_async=True)
    second = warpgroup_mma_wait(1, deps=(second,))
    mbarrier.arrive(empty_r.index(1), count=1)
    acc = warpgroup_mma_wait(0, deps=(second,))
    mbarrier.arrive(empty_r.index(0), count=1)
    return acc, m1, total


@gluon.jit
def attend_even(
    q_left, q_right, q_rope, k_left, k_right, k_rope, p_even, vecs, bars, full_q, empty_q, full_l, full_r, empty_l,
    empty_r, hidden, hidden_ready, out, lse, part_out, part_lse, sinks, seq_lens, scale, value_scale, row, tokens,
    stride_ob, stride_ot, stride_oh, stride_lb, stride_lh, stride_lt, room, begin, end, first, last, first_at, place,
    slot_rows, HEADS: gl.constexpr, CAUSAL: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
    LISTED: gl.constexpr,
):  # fmt: skip
    """Warpgroup 0: even pages, the left half of the sums."""
    done = 0
    walked = 0
    at = first_at
    for sequence in range(first, last):
        kv_len, low, high, at = segment(seq_lens, sequence, at, begin, end, room)
        if low < high:
            position = kv_len - tokens + (row + gl.arange(0, 64, ROW_S)) // HEADS
            unseen = kv_len
            if CAUSAL:
                unseen = kv_len - tokens + row // HEADS + 1
            mbarrier.wait(full_q, walked & 1)
            qr = q_rope.load(QR_LAYOUT)
            acc = gl.zeros((64, 256), gl.float32, O_LAYOUT)
            m = gl.full((64,), LEAST, gl.float32, ROW_S)
            total = gl.zeros((64,), gl.float32, ROW_S)
            s = score(q_left, q_right, qr, k_left, k_right, k_rope, full_l, full_r, done, False, LISTED)
            s = warpgroup_mma_wait(0, deps=(s,))
            for pair in range(low, high - 1):
                x = scaled(
                    s,
                    scale,
                    pair * 128,
                    kv_len,
                    position,
                    unseen,
                    hidden,
                    hidden_ready,
                    done,
                    0,
                    CAUSAL,
                    CAUSAL,
                    LISTED,
                )
                pending, m, total = step_even(
                    x, acc, m, total, p_even, q_rope, k_left, vecs, bars, empty_l, done, 128, False, LISTED
                )
                done += 1
                s = score(q_left, q_right, qr, k_left, k_right, k_rope, full_l, full_r, done, False, LISTED)
                acc = warpgroup_mma_wait(9, deps=(pending,))
                mbarrier.arrive(empty_l.index(1), count=1)
                s = warpgroup_mma_wait(0, deps=(s,))
            key = (high - 1) * 128
            tail = kv_len - key
            if LISTED:
                tail = key * 0 + 128  # rows that are not seen came as zeros
            x = scaled(
                s,
                scale,
                key,
                kv_len,
                position,
                unseen,
                hidden,
                hidden_ready,
                done,
                0,
                CAUSAL,
                True,
                LISTED,
            )
            pending, m, total = step_even(
                x, acc, m, total, p_even, q_rope, k_left, vecs, bars, empty_l, done, tail, True, LISTED
            )
            done += 1
            acc = warpgroup_mma_wait(0, deps=(pending,))
            mbarrier.arrive(empty_l.index(1), count=1)
            whole = add_sums(total, vecs, bars, empty_q, walked & 1, 0)
            store_rows(
                acc, m, whole, out, lse, part_out, part_lse, sinks, sequence, row, tokens, stride_ob, stride_ot,
                stride_oh, stride_lb, stride_lh, stride_lt, (low == 0) & (high * 128 >= kv_len),
                place + (low == 0).to(gl.int32) * slot_rows, value_scale, 0, HEADS, HAS_SINKS, HAS_LSE, LISTED,
            )  # fmt: skip
            walked += 1


@gluon.jit
def attend_odd(
    q_left, q_right, q_rope, k_left, k_right, k_rope, p_even, vecs, bars, full_q, empty_q, full_l, full_r, empty_l,
    empty_r, hidden, hidden_ready, out, lse, part_out, part_lse, sinks, seq_lens, scale, value_scale, row, tokens,
    stride_ob, stride_ot, stride_oh, stride_lb, stride_lh, stride_lt, room, begin, end, first, last, first_at, place,
    slot_rows, HEADS: gl.constexpr, CAUSAL: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
    LISTED: gl.constexpr,
):  # fmt: skip
    """Warpgroup 1: odd pages, the right half of the sums."""
    done = 0
    walked = 0
    at = first_at
    for sequence in range(first, last):
        kv_len, low, high, at = segment(seq_lens, sequence, at, begin, end, room)
        if low < high:
            position = kv_len - tokens + (row + gl.arange(0, 64, ROW_S)) // HEADS
            unseen = kv_len
            if CAUSAL:
                unseen = kv_len - tokens + row // HEADS + 1
            mbarrier.wait(full_q, walked & 1)
            qr = q_rope.load(QR_LAYOUT)
            acc = gl.zeros((64, 256), gl.float32, O_LAYOUT)
            total = gl.zeros((64,), gl.float32, ROW_S)
            s = score(q_left, q_right, qr, k_left, k_right, k_rope, full_l, full_r, done, True, LISTED)
            s = warpgroup_mma_wait(0, deps=(s,))
            for pair in range(low, high - 1):
                x = scaled(
                    s,
                    scale,
                    pair * 128 + 64,
                    kv_len,
                    position,
                    unseen,
                    hidden,
                    hidden_ready,
                    done,
                    1,
                    CAUSAL,
                    CAUSAL,
                    LISTED,
                )
                acc, _, total = step_odd(
                    x, acc, total, p_even, q_rope, k_right, vecs, bars, empty_r, done, 128, False, LISTED
                )
                done += 1
                s = score(q_left, q_right, qr, k_left, k_right, k_rope, full_l, full_r, done, True, LISTED)
                s = warpgroup_mma_wait(0, deps=(s,))
            key = (high - 1) * 128
            tail = kv_len - key
            if LISTED:
                tail = key * 0 + 128  # rows that are not seen came as zeros
            x = scaled(
                s,
                scale,
                key + 64,
                kv_len,
                position,
                unseen,
                hidden,
                hidden_ready,
                done,
                1,
                CAUSAL,
                True,
                LISTED,
            )
            acc, m, total = step_odd(
                x, acc, total, p_even, q_rope, k_right, vecs, bars, empty_r, done, tail, True, LISTED
            )
            done += 1
            whole = add_sums(total, vecs, bars, empty_q, walked & 1, 1)
            store_rows(
                acc, m, whole, out, lse, part_out, part_lse, sinks, sequence, row, tokens, stride_ob, stride_ot,
                stride_oh, stride_lb, stride_lh, stride_lt, (low == 0) & (high * 128 >= kv_len),
                place + (low == 0).to(gl.int32) * slot_rows, value_scale, 1, HEADS, HAS_SINKS, HAS_LSE, LISTED,
            )  # fmt: skip
            walked += 1


@gluon.jit
def add_sums(total, vecs, bars, empty_q, phase, ODD: gl.constexpr):
    """Both warpgroups' sums of probabilities, which pass through vectors that are free by then; release the queries."""
    vecs.index(ALPHA + ODD).store(total)
    mbarrier.arrive(bars.index(SUMS_READY), count=1)
    mbarrier.wait(bars.index(SUMS_READY), phase)
    whole = total + vecs.index(BETA - ODD).load(ROW_S)
    # Warpgroup 0 writes those vectors again once new queries have come, which both release here.
    mbarrier.arrive(empty_q, count=1)
    return whole


@gluon.jit
def store_rows(
    acc, m, total, out, lse, part_out, part_lse, sinks, sequence, row, tokens, stride_ob, stride_ot, stride_oh,
    stride_lb, stride_lh, stride_lt, whole, place, value_scale, ODD: gl.constexpr, HEADS: gl.constexpr,
    HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, LISTED: gl.constexpr,
):  # fmt: skip
    """Write half the columns of a tile: the result if `whole`, or a part from row `place` on and its log2-sum-exp."""
    rows = row + gl.arange(0, 64, ROW_S)
    rows_o = row + gl.arange(0, 64, ROW_O)
    columns = ODD * 256 + gl.arange(0, 256, COL_O)
    valid = rows_o < tokens * HEADS
    if whole:
        top = m
        kept = gl.full((64,), 1.0, gl.float32, ROW_S)
        if HAS_SINKS:
            sink = gl.load(sinks + rows % HEADS).to(gl.float32) * LOG2E
            top = gl.maximum(m, sink)
            kept = gl.exp2(m - top)
            total = total * kept + gl.exp2(sink - top)
        some = total > 0.0
        total = gl.where(some, total, 1.0)
        share = kept / total
        if LISTED >= CONVERTED:
            share = share * value_scale
        result = acc * gl.convert_layout(share, ROW_O)[:, None]
        where = (rows_o // HEADS).to(gl.int64) * stride_ot + (rows_o % HEADS).to(gl.int64) * stride_oh
        where += sequence.to(gl.int64) * stride_ob
        gl.store(out + where[:, None] + columns[None, :], result.to(out.dtype.element_ty), mask=valid[:, None])
        if HAS_LSE and not ODD:
            value = gl.where(some, (top + gl.log2(total)) * LN2, float("-inf"))
            where_lse = (rows // HEADS).to(gl.int64) * stride_lt + (rows % HEADS).to(gl.int64) * stride_lh
            gl.store(lse + sequence.to(gl.int64) * stride_lb + where_lse, value, mask=rows < tokens * HEADS)
    else:
        some = total > 0.0
        total = gl.where(some, total, 1.0)
        share = 1.0 / total
        if LISTED >= CONVERTED:
            share = share * value_scale
        result = acc * gl.convert_layout(share, ROW_O)[:, None]
        part = place + gl.arange(0, 64, ROW_O)
        gl.store(part_out + part.to(gl.int64)[:, None] * 512 + columns[None, :], result, mask=valid[:, None])
        if not ODD:
            value = gl.where(some, m + gl.log2(total), float("-inf"))
            gl.store(part_lse + place + gl.arange(0, 64, ROW_S), value, mask=rows < tokens * HEADS)


@gluon.jit
def shared_memory(q_half, q_rope_desc, FILLERS: gl.constexpr, LISTED: gl.constexpr):
    """Buffers and barriers of a program. FILLERS arrive at the barrier of each 64 columns of keys once they are full.

    Right halves have one more, for the rotary part. What only lists need stands for something else without them.
    Converted, keys and probabilities are float16, and `hidden` has a third vector, of the queries' factors.
    """
    dtype: gl.constexpr = gl.float16 if LISTED >= CONVERTED else gl.bfloat16
    q_left = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 256], q_half.layout)
    q_right = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 256], q_half.layout)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], q_rope_desc.layout)
    k_left = gl.allocate_shared_memory(dtype, [2, 64, 256], q_half.layout)
    k_right = gl.allocate_shared_memory(dtype, [2, 64, 256], q_half.layout)
    k_rope = gl.allocate_shared_memory(dtype, [2, 64, 64], q_rope_desc.layout)
    p_even = gl.allocate_shared_memory(dtype, [64, 64], q_rope_desc.layout)
    vecs = gl.allocate_shared_memory(gl.float32, [4, 64], VECTOR)
    hidden = vecs
    if LISTED:
        hidden = gl.allocate_shared_memory(gl.float32, [3 if LISTED >= CONVERTED else 2, 64], VECTOR)
    full_q = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty_q = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full_l0 = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    full_l1 = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    full_r0 = gl.allocate_shared_memory(gl.int64, [5, 1], mbarrier.MBarrierLayout())
    full_r1 = gl.allocate_shared_memory(gl.int64, [5, 1], mbarrier.MBarrierLayout())
    empty_l = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty_r = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    hidden_ready = empty_r
    if LISTED and LISTED < CONVERTED_PAGES:
        hidden_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    bars = gl.allocate_shared_memory(gl.int64, [5, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full_q, count=1)
    mbarrier.init(empty_q, count=2)
    for i in gl.static_range(2):
        mbarrier.init(empty_l.index(i), count=1)
        mbarrier.init(empty_r.index(i), count=1)
        if LISTED and LISTED < CONVERTED_PAGES:
            mbarrier.init(hidden_ready.index(i), count=1)
    for i in gl.static_range(4):
        mbarrier.init(bars.index(i), count=1)
        mbarrier.init(full_l0.index(i), count=FILLERS)
        mbarrier.init(full_l1.index(i), count=FILLERS)
    for i in gl.static_range(5):
        mbarrier.init(full_r0.index(i), count=FILLERS)
        mbarrier.init(full_r1.index(i), count=FILLERS)
    mbarrier.init(bars.index(SUMS_READY), count=2)
    fence_async_shared()
    return (
        q_left, q_right, q_rope, k_left, k_right, k_rope, p_even, vecs, hidden, full_q, empty_q, full_l0, full_l1,
        full_r0, full_r1, empty_l, empty_r, hidden_ready, bars,
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "num_seqs", "tokens", "q_rows", "stride_table", "page_rows", "num_rows", "last_page", "room", "tiles",
        "stride_lb", "stride_lh", "stride_lt",
    ],
    do_not_specialize_on_alignment=["lse", "sinks", "block_table", "seq_lens"],
)  # fmt: skip
def decode_kernel(
    q_half, q_rope_desc, kv_piece, out, lse, part_out, part_lse, sinks, block_table, seq_lens, scale, num_seqs,
    tokens, q_rows, stride_table, page_rows, num_rows, last_page, room, tiles, stride_ob, stride_ot, stride_oh,
    stride_lb, stride_lh, stride_lt, HEADS: gl.constexpr, CAUSAL: gl.constexpr, HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr, MULTIPLY_WITH: gl.constexpr,
):  # fmt: skip
    """One program per part of the work on a tile of 64 rows; the tiles of a part run together and share pages in L2.

    Args:
        q_half, q_rope_desc: descriptors of q as rows of 576, of 64 x 256 and 64 x 64 elements; kv_piece: of the cache,
            of 64 x 64.
        q_rows: rows between the queries of two sequences.
        page_rows: rows between two pages; `num_rows`: rows of the cache.
        part_out, part_lse: [2 * parts * tiles * 64, 512] and that without columns: results of sequences that several
            parts share, those that begin in an earlier part in the first slot of a part.
    """
    tile = gl.program_id(0) % tiles
    part = gl.program_id(0) // tiles
    parts = gl.num_programs(0) // tiles
    begin, end, first, last, first_at = part_of_program(part, parts, seq_lens, num_seqs, room)
    (
        q_left, q_right, q_rope, k_left, k_right, k_rope, p_even, vecs, hidden, full_q, empty_q, full_l0, full_l1,
        full_r0, full_r1, empty_l, empty_r, hidden_ready, bars,
    ) = shared_memory(q_half, q_rope_desc, 1, 0)  # fmt: skip
    row = tile * 64
    slot_rows = tiles * 64
    place = part * 2 * slot_rows + row
    gl.warp_specialize([
        (attend_even, (
            q_left, q_right, q_rope, k_left, k_right, k_rope, p_even, vecs, bars, full_q, empty_q, full_l0, full_r0,
            empty_l, empty_r, hidden, hidden_ready, out, lse, part_out, part_lse, sinks, seq_lens, scale, 1.0, row,
            tokens, stride_ob, stride_ot, stride_oh, stride_lb, stride_lh, stride_lt, room, begin, end, first, last,
            first_at, place, slot_rows, HEADS, CAUSAL, HAS_SINKS, HAS_LSE, 0,
        )),
        (attend_odd, (
            q_left, q_right, q_rope, k_left, k_right, k_rope, p_even, vecs, bars, full_q, empty_q, full_l1, full_r1,
            empty_l, empty_r, hidden, hidden_ready, out, lse, part_out, part_lse, sinks, seq_lens, scale, 1.0, row,
            tokens, stride_ob, stride_ot, stride_oh, stride_lb, stride_lh, stride_lt, room, begin, end, first, last,
            first_at, place, slot_rows, HEADS, CAUSAL, HAS_SINKS, HAS_LSE, 0,
        )),
        (load_pages, (
            q_half, q_rope_desc, kv_piece, q_left, q_right, q_rope, k_left.index(0), k_rope.index(0), full_q,
            empty_q, full_l0, empty_l.index(0), block_table, seq_lens, row, q_rows, stride_table, page_rows,
            num_rows, last_page, room, begin, end, first, last, first_at, 0, False,
        )),
        (load_pages, (
            q_half, q_rope_desc, kv_piece, q_left, q_right, q_rope, k_right.index(0), k_rope.index(0), full_q,
            empty_q, full_r0, empty_r.index(0), block_table, seq_lens, row, q_rows, stride_table, page_rows,
            num_rows, last_page, room, begin, end, first, last, first_at, 0, True,
        )),
        (load_pages, (
            q_half, q_rope_desc, kv_piece, q_left, q_right, q_rope, k_left.index(1), k_rope.index(1), full_q,
            empty_q, full_l1, empty_l.index(1), block_table, seq_lens, row, q_rows, stride_table, page_rows,
            num_rows, last_page, room, begin, end, first, last, first_at, 1, False,
        )),
        (load_pages, (
            q_half, q_rope_desc, kv_piece, q_left, q_right, q_rope, k_right.index(1), k_rope.index(1), full_q,
            empty_q, full_r1, empty_r.index(1), block_table, seq_lens, row, q_rows, stride_table, page_rows,
            num_rows, last_page, room, begin, end, first, last, first_at, 1, True,
        )),
    ], [4, 1, 1, 1, 1], [MULTIPLY_WITH, 24, 24, 24, 24])  # fmt: skip
