# mypy: ignore-errors
"""Prefill for sm_90 as `prefill.py`, in another order of tiles, and pipelined from one tile to the next.

    sections of heads whose keys and values stay in L2; in one, the longest blocks of rows first, heads adjacent
    a program takes the next tile of all; its loader finds out what it is and writes that for the two warpgroups
    x = S(i + 1) = Q K(i + 1) issued; O *= factor(i); O += P(i) V(i) issued; softmax of S(i + 1); wait for O
    after a tile's last keys: the same with the first keys of the next tile in S(i + 1), and O stored at the end

So tensor cores wait for no softmax at the start of a tile, and O is scaled while scores are multiplied. Sums of a row's
probabilities stay with the threads that made them until the end of a tile. A tile's queries are free once the keys of
its last step are released, so the loader needs no barrier for that.

Source: FlashAttention-3 (Shah et al. 2024), whose scheduler keeps heads in L2 (hopper/tile_scheduler.hpp).
"""

from __future__ import annotations

from kernelhub.backends.gluon.attention.prefill import LEAST, LN2, LOG2E, VECTOR, clear_from, load_rows, scores
from kernelhub.backends.gluon.attention.tiles import key_steps, sequence_of, within
from kernelhub.backends.gluon.language import (
    fence_async_shared,
    gl,
    gluon,
    masked_after,
    masked_outside,
    mbarrier,
    softmax_is_done,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = gl.constexpr(128)  # of a tile
# What the loader writes of a tile for the warpgroups, by place; each thread reads all.
HEAD, SEQUENCE, BLOCK, Q_START, Q_LEN, KV_LEN, LAST_KEYS, STEPS, RIGHT, LEFT, QUERIES = map(gl.constexpr, range(11))
FIELDS = gl.constexpr(16)
EACH = gl.constexpr(gl.BlockedLayout([16], [32], [4], [0]))
# Of results on their way to memory: 16 bytes of a row a thread, 64 adjacent ones in four threads, rows as the tensor
# cores leave them, so that nothing leaves its four threads.
_LANES = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
_LINE = [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]]
_WARPS = [[16, 0], [32, 0]]
LINES_64 = gl.constexpr(gl.DistributedLinearLayout(_LINE, _LANES, _WARPS, [], [64, 64]))
LINES_128 = gl.constexpr(gl.DistributedLinearLayout([*_LINE, [0, 64]], _LANES, _WARPS, [], [64, 128]))
LINES_256 = gl.constexpr(gl.DistributedLinearLayout([*_LINE, [0, 64], [0, 128]], _LANES, _WARPS, [], [64, 256]))


@gluon.jit
def tile_in_order(
    t, cu_seqlens_q, cu_seqlens_k, seq_lens, num_seqs, q_tokens, kv_tokens, total, together, HEADS: gl.constexpr,
    RAGGED: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """(head, sequence, row block, first query, queries, first key, keys); the block is below 0 if it has no rows.

    `together` are the heads of a section, those of several sequences if they are batched. No row is outside of the
    operands, whatever offsets and lengths say.
    """
    there = t < total
    t = gl.minimum(t, total - 1)
    units = num_seqs * HEADS
    places = (q_tokens + (ROWS - 1)) // ROWS
    if RAGGED:
        units = num_seqs * 0 + HEADS
        places = q_tokens // ROWS + num_seqs
    section = t // (together * places)
    t -= section * (together * places)
    wide = gl.minimum(together, units - section * together)
    place = t // wide
    unit = section * together + t % wide
    q_start = t * 0
    q_len = q_tokens
    if RAGGED:
        head = unit
        sequence, place = sequence_of(place, cu_seqlens_q, num_seqs, ROWS)
        q_start, q_len = within(cu_seqlens_q, sequence, q_tokens)
    else:
        head = unit % HEADS
        sequence = unit // HEADS
    block = (q_len + (ROWS - 1)) // ROWS - 1 - place
    block = gl.where(there & (place >= 0), block, -1)
    kv_start = t * 0
    kv_len = kv_tokens
    if PAGE > 0:
        kv_len = gl.minimum(gl.maximum(gl.load(seq_lens + sequence), 0), kv_tokens)
    elif RAGGED:
        kv_start, kv_len = within(cu_seqlens_k, sequence, kv_tokens)
    return head, sequence, block, q_start, q_len, kv_start, kv_len


@gluon.jit
def number_told(told, at: gl.constexpr):
    """A number that the loader wrote."""
    field = gl.arange(0, FIELDS, EACH)
    return gl.sum(gl.where(field == at, told.load(EACH), 0), 0)


@gluon.jit
def queries_told(told, q_buf, q_buf1, WHICH: gl.constexpr, Q_STAGES: gl.constexpr):
    """A warpgroup's queries of a tile, found anew for each loop.

    From one place for several loops, ptxas of CUDA 12.8 computed their descriptors before the first loop alone, which
    is skipped if it has no steps: the others then multiplied what lay elsewhere.
    """
    at = 0
    if Q_STAGES > 1:
        at = number_told(told, QUERIES)
    return q_buf.index(at + WHICH), q_buf1.index(at + WHICH)


@gluon.jit
def following_tile(turn, counters, in_order, total):
    """(the next tile of all, a turn that ends the program if there is none); without counters one of the next round.

    Rounds go forwards, then backwards, so that no program always has the longest tile.
    """
    programs = gl.num_programs(0)
    me = gl.program_id(0)
    turn += 1
    t = turn * programs + gl.where(turn % 2 == 0, me, programs - 1 - me)
    if in_order:
        t = programs + gl.atomic_add(counters, 1, sem="relaxed")
        turn = gl.where(t < total, 0, total)
    return t, turn


@gluon.jit
def load_tiles(
    q_desc, q_rest, k_desc, k_rest, v_desc, q_buf, q_buf1, k_bufs, k_bufs1, v_bufs, told, q_full, k_full, k_empty,
    v_full, v_empty, counters, in_order, cu_seqlens_q, cu_seqlens_k, block_table, seq_lens, num_seqs, q_tokens,
    kv_tokens, total, together, stride_table, page_rows_k, page_rows_v, rows_k, rows_v, last_page, q_batch, q_head_row,
    q_head_column, k_batch, k_head_row, k_head_column, v_batch, v_head_row, v_head_column, window_left, window_right,
    HEADS: gl.constexpr, GROUP: gl.constexpr, RAGGED: gl.constexpr, PAGE: gl.constexpr, D0: gl.constexpr,
    D1: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
):  # fmt: skip
    """Of each tile the last keys, then what tile it is and its queries, then values and keys in turns.

    A buffer of queries is free, and what a tile was is read, once a step of keys is released. Tiles have a step at
    least, so that is the step Q_STAGES before; the wait for a stage of keys has seen it if there are no more of those.
    """
    pieces: gl.constexpr = BLOCK_N // PAGE if PAGE > 0 and PAGE < BLOCK_N else 1
    AHEAD: gl.constexpr = STAGES - Q_STAGES if STAGES > Q_STAGES else 0
    field = gl.arange(0, FIELDS, gl.BlockedLayout([4], [32], [1], [0]))
    programs = gl.num_programs(0)
    step = 0
    done = 0
    turn = 0
    t = gl.program_id(0)
    while turn * programs < total:
        head, sequence, block, q_start, q_len, kv_start, kv_len = tile_in_order(
            t, cu_seqlens_q, cu_seqlens_k, seq_lens, num_seqs, q_tokens, kv_tokens, total, together, HEADS, RAGGED,
            PAGE,
        )  # fmt: skip
        if block >= 0:
            low, steps, right, left = key_steps(
                block, q_len, kv_len, window_left, window_right, HAS_LEFT, HAS_RIGHT, BLOCK_N, 1
            )
            last_keys = low + (steps - 1) * BLOCK_N
            say = gl.where(field == HEAD, head, gl.where(field == SEQUENCE, sequence, block))
            say = gl.where(field == Q_START, q_start, gl.where(field == Q_LEN, q_len, say))
            say = gl.where(field == KV_LEN, kv_len, gl.where(field == LAST_KEYS, last_keys, say))
            say = gl.where(field == STEPS, steps, gl.where(field == RIGHT, right, gl.where(field == LEFT, left, say)))
            say = gl.where(field == QUERIES, done % Q_STAGES * 2, say)
            row = q_start + sequence * q_batch + head * q_head_row + block * ROWS
            column = head * q_head_column
            pages = block_table
            if PAGE > 0:
                pages += sequence.to(gl.int64) * stride_table
            kv_head = head // GROUP
            row_k = kv_start + kv_head * k_head_row
            row_v = kv_start + kv_head * v_head_row
            if PAGE == 0:
                row_k += sequence * k_batch
                row_v += sequence * v_batch
            for i in range(steps):
                n = last_keys - i * BLOCK_N
                s = step % STAGES
                phase = ((step // STAGES) & 1) ^ 1
                mbarrier.wait(k_empty.index(s), phase)
                if D1 > 0:
                    nbytes: gl.constexpr = (k_desc.block_type.nbytes + k_rest.block_type.nbytes) * pieces
                    mbarrier.expect(k_full.index(s), nbytes)
                    load_rows(
                        k_rest, k_bufs1.index(s), k_full.index(s), pages, row_k, n, kv_head * k_head_column + D0,
                        kv_len, page_rows_k, rows_k, last_page, PAGE, BLOCK_N,
                    )  # fmt: skip
                else:
                    mbarrier.expect(k_full.index(s), k_desc.block_type.nbytes * pieces)
                load_rows(
                    k_desc, k_bufs.index(s), k_full.index(s), pages, row_k, n, kv_head * k_head_column, kv_len,
                    page_rows_k, rows_k, last_page, PAGE, BLOCK_N,
                )  # fmt: skip
                if i == 0:
                    if AHEAD > 0:
                        mbarrier.wait(k_empty.index((step + AHEAD) % STAGES), (((step + AHEAD) // STAGES) & 1) ^ 1)
                    told.index(done % (Q_STAGES + 1)).store(say)
                    for w in gl.static_range(2):
                        at = done % Q_STAGES * 2 + w
                        mbarrier.arrive(q_full.index(at), count=1)  # for what was written: `expect` waits for no thread
                        if D1 > 0:
                            mbarrier.expect(q_full.index(at), q_desc.block_type.nbytes + q_rest.block_type.nbytes)
                            tma_load(q_rest, [row + w * 64, column + D0], q_full.index(at), q_buf1.index(at))
                        else:
                            mbarrier.expect(q_full.index(at), q_desc.block_type.nbytes)
                        tma_load(q_desc, [row + w * 64, column], q_full.index(at), q_buf.index(at))
                    t, turn = following_tile(turn, counters, in_order, total)  # here no load waits for the counter
                mbarrier.wait(v_empty.index(s), phase)
                mbarrier.expect(v_full.index(s), v_desc.block_type.nbytes * pieces)
                load_rows(
                    v_desc, v_bufs.index(s), v_full.index(s), pages, row_v, n, kv_head * v_head_column, kv_len,
                    page_rows_v, rows_v, last_page, PAGE, BLOCK_N,
                )  # fmt: skip
                step += 1
            done += 1
        else:
            t, turn = following_tile(turn, counters, in_order, total)
    mbarrier.wait(k_empty.index((step + AHEAD) % STAGES), (((step + AHEAD) // STAGES) & 1) ^ 1)
    told.index(done % (Q_STAGES + 1)).store(field * 0 - 1)
    for w in gl.static_range(2):
        mbarrier.arrive(q_full.index(done % Q_STAGES * 2 + w), count=2)
    if in_order:
        ended = gl.atomic_add(counters + 1, 1, sem="acq_rel")
        if ended == programs - 1:  # all have taken their last tiles
            gl.store(counters, 0)
            gl.store(counters + 1, 0)


@gluon.jit
def products_with_keys(q, q1, k_bufs, k_bufs1, s, D1: gl.constexpr, BLOCK_N: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Scores of one stage, issued."""
    zero = gl.zeros((64, BLOCK_N), gl.float32, S_LAYOUT)
    x = warpgroup_mma(q, k_bufs.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
    if D1 > 0:
        x = warpgroup_mma(q1, k_bufs1.index(s).permute((1, 0)), x, is_async=True)
    return x


@gluon.jit
def of_seen(
    x, n, position, kv_len, score_scale, softcap, window_left, window_right, BLOCK_N: gl.constexpr,
    MASK: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    SCALED: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """As `scores`; but each is masked as it is compared: of comparisons first the assembler has no place for all."""
    x = scores(
        x, n, position, kv_len, score_scale, softcap, window_left, window_right, BLOCK_N, False, HAS_LEFT, HAS_RIGHT,
        HAS_SOFTCAP, SCALED, S_LAYOUT,
    )  # fmt: skip
    if MASK:
        key = (n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT)))[None, :]
        last = position * 0 + (kv_len - 1)
        if HAS_RIGHT:
            last = gl.minimum(position + window_right, last)
        if HAS_LEFT:
            x = masked_outside(x, key, (position - window_left)[:, None], last[:, None])
        else:
            x = masked_after(x, key, last[:, None])
    return x


@gluon.jit
def probabilities(
    x, m, factor, dtype: gl.constexpr, BLOCK_N: gl.constexpr, P_LAYOUT: gl.constexpr, SUMS: gl.constexpr
):  # fmt: skip
    """(maximum of scores and m, sums of each thread's columns of 2^(score - maximum), those in `dtype`)."""
    new = gl.maximum(m, gl.max(x, 1) * factor)
    weights = gl.exp2(x * factor - new[:, None])
    sums = gl.convert_layout(gl.sum(weights.reshape((64, BLOCK_N // 8, 8)), 1), SUMS)
    return new, sums, gl.convert_layout(weights.to(dtype), P_LAYOUT)


@gluon.jit
def step_keys(
    acc, alpha, m, sums, p, q, q1, k_bufs, k_bufs1, v_bufs, k_full, k_empty, v_full, v_empty, taken, step, n, position,
    kv_len, factor, score_scale, softcap, window_left, window_right, WHICH: gl.constexpr, MASK: gl.constexpr,
    D1: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr, SCALED: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, IN_TURNS: gl.constexpr, S_LAYOUT: gl.constexpr,
    O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Scores of step `step` are multiplied while values of the step before are; the softmax of these meanwhile."""
    before = (step - 1) % STAGES
    s = step % STAGES
    mbarrier.wait(k_full.index(s), (step // STAGES) & 1)
    if IN_TURNS:
        mbarrier.wait(taken.index(WHICH), (step & 1) ^ (1 - WHICH))
    started = products_with_keys(q, q1, k_bufs, k_bufs1, s, D1, BLOCK_N, S_LAYOUT)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
    mbarrier.wait(v_full.index(before), ((step - 1) // STAGES) & 1)
    pending = warpgroup_mma(p, v_bufs.index(before), acc, is_async=True)
    if IN_TURNS:
        mbarrier.arrive(taken.index(1 - WHICH), count=1)
    x = warpgroup_mma_wait(1, deps=(started,))
    mbarrier.arrive(k_empty.index(s), count=1)
    x = of_seen(
        x, n, position, kv_len, score_scale, softcap, window_left, window_right, BLOCK_N, MASK, HAS_LEFT, HAS_RIGHT,
        HAS_SOFTCAP, SCALED, S_LAYOUT,
    )  # fmt: skip
    new, part, after = probabilities(x, m, factor, v_bufs.dtype, BLOCK_N, P_LAYOUT, SUMS)
    alpha = gl.exp2(m - new)
    sums = sums * gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))[:, None] + part
    softmax_is_done(sums)
    # Beside the sums, what must be done before the wait (the softmax), and what must live until then (p).
    acc, p, alpha, after = warpgroup_mma_wait(0, deps=(pending, p, alpha, after))
    mbarrier.arrive(v_empty.index(before), count=1)
    return acc, alpha, new, sums, after


@gluon.jit
def attend(
    q_buf, q_buf1, k_bufs, k_bufs1, v_bufs, told, q_full, k_full, k_empty, v_full, v_empty, taken, cleared, out, lse,
    sinks, score_scale, softcap, window_left, window_right, stride_ob, stride_ot, stride_oh, stride_lb, stride_lh,
    stride_lt, WHICH: gl.constexpr, RAGGED: gl.constexpr, D1: gl.constexpr, DV: gl.constexpr, WIDTH: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr, SCALED: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    IN_TURNS: gl.constexpr,
):  # fmt: skip
    """A warpgroup: 64 rows of each tile of its program."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    # Two of eight columns a thread: where S_LAYOUT has one of each eight.
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 16])
    row: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    least = gl.full((64,), LEAST, gl.float32, row)  # a row may see none of the last keys
    factor = score_scale
    if SCALED or HAS_SOFTCAP:
        factor = 1.0
    step = 0
    done = 0
    tails = 0
    m = least
    sums = gl.zeros((64, 8), gl.float32, SUMS)
    p = gl.zeros((64, BLOCK_N), v_bufs.dtype, P_LAYOUT)
    mbarrier.wait(q_full.index(WHICH), 0)
    block = number_told(told.index(0), BLOCK)
    if block >= 0:  # later tiles have their first step beside the last of the tile before
        n = number_told(told.index(0), LAST_KEYS)
        kv_len = number_told(told.index(0), KV_LEN)
        position = kv_len - number_told(told.index(0), Q_LEN) + block * ROWS + WHICH * 64 + gl.arange(0, 64, row)
        mbarrier.wait(k_full.index(0), 0)
        if IN_TURNS:
            mbarrier.wait(taken.index(WHICH), 1 - WHICH)
        started = products_with_keys(q_buf.index(WHICH), q_buf1.index(WHICH), k_bufs, k_bufs1, 0, D1, BLOCK_N, S_LAYOUT)
        if IN_TURNS:
            mbarrier.arrive(taken.index(1 - WHICH), count=1)
        x = warpgroup_mma_wait(0, deps=(started,))
        mbarrier.arrive(k_empty.index(0), count=1)
        x = of_seen(
            x, n, position, kv_len, score_scale, softcap, window_left, window_right, BLOCK_N, True, HAS_LEFT,
            HAS_RIGHT, HAS_SOFTCAP, SCALED, S_LAYOUT,
        )  # fmt: skip
        m, sums, p = probabilities(x, least, factor, v_bufs.dtype, BLOCK_N, P_LAYOUT, SUMS)
        if n + BLOCK_N > kv_len:
            mbarrier.wait(v_full.index(0), 0)
            clear_from(v_bufs.index(0), kv_len - n, cleared, 0, WHICH, BLOCK_N)
            tails += 1
        step += 1
    while block >= 0:
        tile = told.index(done % (Q_STAGES + 1))
        head = number_told(tile, HEAD)
        sequence = number_told(tile, SEQUENCE)
        q_start = number_told(tile, Q_START)
        q_len = number_told(tile, Q_LEN)
        kv_len = number_told(tile, KV_LEN)
        last_keys = number_told(tile, LAST_KEYS)
        steps = number_told(tile, STEPS)
        right = number_told(tile, RIGHT)
        left = number_told(tile, LEFT)
        first = block * ROWS + WHICH * 64
        token = first + gl.arange(0, 64, row)
        position = kv_len - q_len + token
        acc = gl.zeros((64, DV), gl.float32, O_LAYOUT)
        alpha = gl.full((64,), 1.0, gl.float32, row)
        q, q1 = queries_told(tile, q_buf, q_buf1, WHICH, Q_STAGES)
        for i in range(1, right):
            acc, alpha, m, sums, p = step_keys(
                acc, alpha, m, sums, p, q, q1, k_bufs, k_bufs1, v_bufs, k_full, k_empty, v_full, v_empty, taken,
                step, last_keys - i * BLOCK_N, position, kv_len, factor, score_scale, softcap, window_left,
                window_right, WHICH, True, D1, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, SCALED, BLOCK_N, STAGES, IN_TURNS,
                S_LAYOUT, O_LAYOUT, P_LAYOUT, SUMS,
            )  # fmt: skip
            step += 1
        q, q1 = queries_told(tile, q_buf, q_buf1, WHICH, Q_STAGES)
        for _ in range(right, left):
            acc, alpha, m, sums, p = step_keys(
                acc, alpha, m, sums, p, q, q1, k_bufs, k_bufs1, v_bufs, k_full, k_empty, v_full, v_empty, taken,
                step, 0, position, kv_len, factor, score_scale, softcap, window_left, window_right, WHICH, False,
                D1, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, SCALED, BLOCK_N, STAGES, IN_TURNS, S_LAYOUT, O_LAYOUT,
                P_LAYOUT, SUMS,
            )  # fmt: skip
            step += 1
        if HAS_LEFT:
            q, q1 = queries_told(tile, q_buf, q_buf1, WHICH, Q_STAGES)
            for i in range(left, steps):
                acc, alpha, m, sums, p = step_keys(
                    acc, alpha, m, sums, p, q, q1, k_bufs, k_bufs1, v_bufs, k_full, k_empty, v_full, v_empty,
                    taken, step, last_keys - i * BLOCK_N, position, kv_len, factor, score_scale, softcap,
                    window_left, window_right, WHICH, True, D1, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, SCALED, BLOCK_N,
                    STAGES, IN_TURNS, S_LAYOUT, O_LAYOUT, P_LAYOUT, SUMS,
                )  # fmt: skip
                step += 1
        done += 1
        mbarrier.wait(q_full.index(done % Q_STAGES * 2 + WHICH), (done // Q_STAGES) & 1)
        tile = told.index(done % (Q_STAGES + 1))
        block = number_told(tile, BLOCK)
        before = (step - 1) % STAGES
        last_m = m
        last_sums = sums
        if block >= 0:
            n = number_told(tile, LAST_KEYS)
            kv_len = number_told(tile, KV_LEN)
            position = kv_len - number_told(tile, Q_LEN) + block * ROWS + WHICH * 64 + gl.arange(0, 64, row)
            s = step % STAGES
            mbarrier.wait(k_full.index(s), (step // STAGES) & 1)
            if IN_TURNS:
                mbarrier.wait(taken.index(WHICH), (step & 1) ^ (1 - WHICH))
            q, q1 = queries_told(tile, q_buf, q_buf1, WHICH, Q_STAGES)
            started = products_with_keys(q, q1, k_bufs, k_bufs1, s, D1, BLOCK_N, S_LAYOUT)
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
            mbarrier.wait(v_full.index(before), ((step - 1) // STAGES) & 1)
            pending = warpgroup_mma(p, v_bufs.index(before), acc, is_async=True)
            if IN_TURNS:
                mbarrier.arrive(taken.index(1 - WHICH), count=1)
            x = warpgroup_mma_wait(1, deps=(started,))
            mbarrier.arrive(k_empty.index(s), count=1)
            x = of_seen(
                x, n, position, kv_len, score_scale, softcap, window_left, window_right, BLOCK_N, True,
                HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, SCALED, S_LAYOUT,
            )  # fmt: skip
            m, sums, next_p = probabilities(x, least, factor, v_bufs.dtype, BLOCK_N, P_LAYOUT, SUMS)
            softmax_is_done(sums)
            acc, p, next_p = warpgroup_mma_wait(0, deps=(pending, p, next_p))
            mbarrier.arrive(v_empty.index(before), count=1)
            p = next_p
            if n + BLOCK_N > kv_len:
                mbarrier.wait(v_full.index(s), (step // STAGES) & 1)
                clear_from(v_bufs.index(s), kv_len - n, cleared, tails & 1, WHICH, BLOCK_N)
                tails += 1
            step += 1
        else:
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
            mbarrier.wait(v_full.index(before), ((step - 1) // STAGES) & 1)
            pending = warpgroup_mma(p, v_bufs.index(before), acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=(pending, p))
            mbarrier.arrive(v_empty.index(before), count=1)
        store_rows(
            acc, last_m, gl.convert_layout(gl.sum(last_sums, 1), row), out, lse, sinks, sequence, head, token,
            first, q_start, q_len, stride_ob, stride_ot, stride_oh, stride_lb, stride_lh, stride_lt, DV, WIDTH,
            RAGGED, HAS_SINKS, HAS_LSE, O_LAYOUT,
        )  # fmt: skip


@gluon.jit
def store_rows(
    acc, m, total, out, lse, sinks, sequence, head, token, first, q_start, q_len, stride_ob, stride_ot, stride_oh,
    stride_lb, stride_lh, stride_lt, DV: gl.constexpr, WIDTH: gl.constexpr, RAGGED: gl.constexpr,
    HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add the sink to the denominator, divide, write the rows that the sequence has."""
    LINES: gl.constexpr = LINES_64 if DV == 64 else LINES_128 if DV == 128 else LINES_256
    batch = sequence
    if RAGGED:
        batch = sequence * 0
    rows = first + gl.arange(0, 64, gl.SliceLayout(1, LINES))
    columns = gl.arange(0, DV, gl.SliceLayout(0, LINES))
    if HAS_SINKS:
        sink = gl.load(sinks + head).to(gl.float32) * LOG2E
        top = gl.maximum(m, sink)
        kept = gl.exp2(m - top)
        total = total * kept + gl.exp2(sink - top)
        acc = acc * gl.convert_layout(kept, gl.SliceLayout(1, O_LAYOUT))[:, None]
        m = top
    some = total > 0.0
    total = gl.where(some, total, 1.0)
    result = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, O_LAYOUT))[:, None]
    result = gl.convert_layout(result.to(out.dtype.element_ty), LINES)
    out += batch.to(gl.int64) * stride_ob + q_start.to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
    kept = (rows < q_len)[:, None]
    if WIDTH < DV:
        kept = kept & (columns < WIDTH)[None, :]  # what is behind a head's values is another's
    gl.store(out + (rows.to(gl.int64) * stride_ot)[:, None] + columns[None, :], result, mask=kept)
    if HAS_LSE:
        lse += batch.to(gl.int64) * stride_lb + head.to(gl.int64) * stride_lh
        value = gl.where(some, (m + gl.log2(total)) * LN2, float("-inf"))
        gl.store(lse + (q_start + token).to(gl.int64) * stride_lt, value, mask=token < q_len)


@gluon.jit(
    do_not_specialize=[
        "num_seqs", "q_tokens", "kv_tokens", "total", "stride_table", "page_rows_k", "page_rows_v", "rows_k",
        "rows_v", "last_page", "q_batch", "q_head_row", "q_head_column", "k_batch", "k_head_row", "k_head_column",
        "v_batch", "v_head_row", "v_head_column", "window_left", "window_right", "stride_lb", "stride_lh", "stride_lt",
        "in_order", "together",
    ],
    do_not_specialize_on_alignment=[
        "lse", "sinks", "counters", "cu_seqlens_q", "cu_seqlens_k", "block_table", "seq_lens",
    ],
)  # fmt: skip
def pipelined_kernel(
    q_desc, q_rest, k_desc, k_rest, v_desc, out, lse, sinks, cu_seqlens_q, cu_seqlens_k, block_table, seq_lens,
    score_scale, softcap, num_seqs, q_tokens, kv_tokens, total, stride_table, page_rows_k, page_rows_v, rows_k, rows_v,
    last_page, q_batch, q_head_row, q_head_column, k_batch, k_head_row, k_head_column, v_batch, v_head_row,
    v_head_column, window_left, window_right, stride_ob, stride_ot, stride_oh, stride_lb, stride_lh, stride_lt,
    counters, in_order, together, HEADS: gl.constexpr, GROUP: gl.constexpr, RAGGED: gl.constexpr, PAGE: gl.constexpr,
    D0: gl.constexpr, D1: gl.constexpr, DV: gl.constexpr, WIDTH: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
    SCALED: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr, IN_TURNS: gl.constexpr,
):  # fmt: skip
    """Programs take tiles in turns.

    Args:
        q_desc, ..., stride_lt: as `prefill_kernel` has them.
        counters, in_order: two zeros, which are zero again at the end, by which programs take the next tile of all; or
            `in_order` is 0, and a program takes one of as many tiles as there are programs.
        together: heads of a section, a multiple of GROUP; of batched sequences (sequence, head) are counted.
        SCALED: `score_scale` is not positive, so that it does not commute with the maximum.
        IN_TURNS: the two warpgroups issue the products of a step in turns.
    """
    q_buf = gl.allocate_shared_memory(q_desc.dtype, [2 * Q_STAGES, 64, D0], q_desc.layout)
    k_bufs = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, D0], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(v_desc.dtype, [STAGES, BLOCK_N, DV], v_desc.layout)
    q_buf1 = q_buf
    k_bufs1 = k_bufs
    if D1 > 0:
        q_buf1 = gl.allocate_shared_memory(q_desc.dtype, [2 * Q_STAGES, 64, D1], q_rest.layout)
        k_bufs1 = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, D1], k_rest.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2 * Q_STAGES, 1], mbarrier.MBarrierLayout())
    cleared = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int32, [Q_STAGES + 1, FIELDS], VECTOR)
    taken = q_full  # not used unless it is replaced: see `language.py` for barriers that nothing uses
    if IN_TURNS:
        taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for w in gl.static_range(2):
            mbarrier.init(taken.index(w), count=1)
    mbarrier.init(cleared, count=2)
    for w in gl.static_range(2 * Q_STAGES):
        mbarrier.init(q_full.index(w), count=2)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=2)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(v_empty.index(s), count=2)
    fence_async_shared()
    gl.warp_specialize([
        (attend, (
            q_buf, q_buf1, k_bufs, k_bufs1, v_bufs, told, q_full, k_full, k_empty, v_full, v_empty, taken, cleared, out,
            lse, sinks, score_scale, softcap, window_left, window_right, stride_ob, stride_ot, stride_oh, stride_lb,
            stride_lh, stride_lt, 0, RAGGED, D1, DV, WIDTH, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_SINKS, HAS_LSE,
            SCALED, BLOCK_N, STAGES, Q_STAGES, IN_TURNS,
        )),
        (attend, (
            q_buf, q_buf1, k_bufs, k_bufs1, v_bufs, told, q_full, k_full, k_empty, v_full, v_empty, taken, cleared, out,
            lse, sinks, score_scale, softcap, window_left, window_right, stride_ob, stride_ot, stride_oh, stride_lb,
            stride_lh, stride_lt, 1, RAGGED, D1, DV, WIDTH, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_SINKS, HAS_LSE,
            SCALED, BLOCK_N, STAGES, Q_STAGES, IN_TURNS,
        )),
        (load_tiles, (
            q_desc, q_rest, k_desc, k_rest, v_desc, q_buf, q_buf1, k_bufs, k_bufs1, v_bufs, told, q_full, k_full,
            k_empty, v_full, v_empty, counters, in_order, cu_seqlens_q, cu_seqlens_k, block_table, seq_lens, num_seqs,
            q_tokens, kv_tokens, total, together, stride_table, page_rows_k, page_rows_v, rows_k, rows_v, last_page,
            q_batch, q_head_row, q_head_column, k_batch, k_head_row, k_head_column, v_batch, v_head_row, v_head_column,
            window_left, window_right, HEADS, GROUP, RAGGED, PAGE, D0, D1, HAS_LEFT, HAS_RIGHT, BLOCK_N, STAGES,
            Q_STAGES,
        )),
    ], [4, 1], [240, 24])  # fmt: skip
