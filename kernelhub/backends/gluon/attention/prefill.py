# mypy: ignore-errors
"""Prefill over float8 for sm_90: 128 rows of queries of one head, BLOCK_N keys a step, by TMA, dense or from pages.

A persistent program of four parts: one warp loads, four warps make tiles in 16 bits of what it loads
(`converting.py`), two warpgroups hold 64 rows each. Within a warpgroup the scores of the next keys are multiplied while
the softmax of these is taken.

    tile -> (sequence, head, row block), the longest blocks of a causal sequence first; heads of a block adjacent
    keys from the last to the first: masked steps, then those that all rows see, then those that a left window cuts
    x = S(i) waited for; issue S(i + 1) = Q K(i + 1), O += P(i) V(i); softmax of S(i + 1); wait for O

Keys past a sequence's end are masked, and rows of its last tile of values there are cleared in shared memory: they may
hold NaN, and 0 times NaN is NaN. Pages past the end are not looked up; TMA reads zeros outside of a
tensor.

Source: FlashAttention-3 (Shah et al. 2024).
"""

from __future__ import annotations

from kernelhub.backends.gluon.attention.converting import convert_tiles, narrowed, scale_of
from kernelhub.backends.gluon.attention.tiles import key_steps, own_steps, tile_of
from kernelhub.backends.gluon.language import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
# Below every score, and finite: 2^(-inf - LEAST) is 0, so a row that sees no key has sums of 0.
LEAST = gl.constexpr(-1e30)
TINY = gl.constexpr(1.1754943508222875e-38)
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def load_rows(
    desc, buf, full, pages, first_row, n, column, kv_len, page_rows, num_rows, last_page, PAGE: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of keys or values from key `n` on: adjacent ones, or those of pages."""
    if PAGE == 0:
        tma_load(desc, [first_row + n, column], full, buf)
    elif PAGE >= BLOCK_N:
        row = num_rows
        if n < kv_len:
            page = gl.minimum(gl.maximum(gl.load(pages + n // PAGE), 0), last_page)
            row = first_row + page * page_rows + n % PAGE
        tma_load(desc, [row, column], full, buf)
    else:
        for piece in gl.static_range(BLOCK_N // PAGE):
            row = num_rows
            if n + piece * PAGE < kv_len:
                page = gl.minimum(gl.maximum(gl.load(pages + n // PAGE + piece), 0), last_page)
                row = first_row + page * page_rows
            tma_load(desc, [row, column], full, buf.slice(piece * PAGE, PAGE))


@gluon.jit
def load_tiles(
    q_desc, q_rest, k_desc, k_rest, v_desc, q_buf, q_buf1, k_bufs, k_bufs1, v_bufs, q_full, q_empty, k_full, k_empty,
    v_full, v_empty, cu_seqlens_q, cu_seqlens_k, block_table, seq_lens, num_seqs, q_tokens, kv_tokens, total,
    stride_table, page_rows_k, page_rows_v, rows_k, rows_v, last_page, q_batch, q_head_row, q_head_column, k_batch,
    k_head_row, k_head_column, v_batch, v_head_row, v_head_column, window_left, window_right, HEADS: gl.constexpr,
    GROUP: gl.constexpr, RAGGED: gl.constexpr, PAGE: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr, PACK: gl.constexpr,
):  # fmt: skip
    MANY: gl.constexpr = 64 // PACK  # queries of a warpgroup
    step = 0
    done = 0
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        head, sequence, block, q_start, q_len, kv_start, kv_len = tile_of(
            t, cu_seqlens_q, cu_seqlens_k, seq_lens, num_seqs, q_tokens, kv_tokens, HEADS, RAGGED, PAGE, PACK
        )
        if block >= 0:
            low, steps, _, _ = key_steps(
                block, q_len, kv_len, window_left, window_right, HAS_LEFT, HAS_RIGHT, BLOCK_N, PACK
            )
            row = q_start + sequence * q_batch + head * q_head_row + block * (2 * MANY)
            for w in gl.static_range(2):
                at = done % Q_STAGES * 2 + w
                mbarrier.wait(q_empty.index(at), ((done // Q_STAGES) & 1) ^ 1)
                if D1 > 0:
                    mbarrier.expect(q_full.index(at), (q_desc.block_type.nbytes + q_rest.block_type.nbytes) * PACK)
                else:
                    mbarrier.expect(q_full.index(at), q_desc.block_type.nbytes * PACK)
                if PACK > 1:
                    for h in gl.static_range(PACK):
                        q_row = row + w * MANY + h * q_head_row
                        column = (head + h) * q_head_column
                        if D1 > 0:
                            rest = q_buf1.index(at).slice(h * MANY, MANY)
                            tma_load(q_rest, [q_row, column + D0], q_full.index(at), rest)
                        into = q_buf.index(at).slice(h * MANY, MANY)
                        tma_load(q_desc, [q_row, column], q_full.index(at), into)
                else:
                    if D1 > 0:
                        tma_load(q_rest, [row + w * 64, head * q_head_column + D0], q_full.index(at), q_buf1.index(at))
                    tma_load(q_desc, [row + w * 64, head * q_head_column], q_full.index(at), q_buf.index(at))
            pages = block_table
            if PAGE > 0:
                pages += sequence.to(gl.int64) * stride_table
            kv_head = head // GROUP
            row_k = kv_start + kv_head * k_head_row
            row_v = kv_start + kv_head * v_head_row
            if PAGE == 0:
                row_k += sequence * k_batch
                row_v += sequence * v_batch
            pieces: gl.constexpr = BLOCK_N // PAGE if PAGE > 0 and PAGE < BLOCK_N else 1
            for i in range(steps):
                n = low + (steps - 1 - i) * BLOCK_N
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
                mbarrier.wait(v_empty.index(s), phase)
                mbarrier.expect(v_full.index(s), v_desc.block_type.nbytes * pieces)
                load_rows(
                    v_desc, v_bufs.index(s), v_full.index(s), pages, row_v, n, kv_head * v_head_column, kv_len,
                    page_rows_v, rows_v, last_page, PAGE, BLOCK_N,
                )  # fmt: skip
                step += 1
            done += 1


@gluon.jit
def scores(
    x, n, position, kv_len, score_scale, softcap, window_left, window_right, BLOCK_N: gl.constexpr,
    MASK: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    SCALED: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Products as scores in units of log2, or without their factor unless SCALED; -inf where a row sees no key."""
    if HAS_SOFTCAP:
        # tanh without libdevice, exact at both ends.
        x = softcap - (2.0 * softcap) / (gl.exp2(x * (score_scale * (2.0 * LOG2E))) + 1.0)
    elif SCALED:
        x = x * score_scale
    if MASK:
        key = (n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT)))[None, :]
        if HAS_RIGHT:
            seen = key <= gl.minimum(position + window_right, kv_len - 1)[:, None]
        else:
            seen = key < kv_len
        if HAS_LEFT:
            seen = seen & (key >= (position - window_left)[:, None])
        x = gl.where(seen, x, float("-inf"))
    return x


@gluon.jit
def clear_from(buf, limit, cleared, phase, WHICH: gl.constexpr, BLOCK_N: gl.constexpr):
    """Write zeros into the rows of a tile of values from `limit` on: half of them here, half in the other warpgroup."""
    pieces: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    for piece in gl.static_range(WHICH * (BLOCK_N // 32), (WHICH + 1) * (BLOCK_N // 32)):
        if limit < piece * 16 + 16:
            rows = piece * 16 + gl.arange(0, 16, gl.SliceLayout(1, pieces))
            part = buf.slice(piece * 16, 16)
            value = part.load(pieces)
            part.store(gl.where((rows < limit)[:, None], value, gl.zeros_like(value)))
    fence_async_shared()
    mbarrier.arrive(cleared, count=1)
    mbarrier.wait(cleared, phase)


@gluon.jit
def within_head(row, PACK: gl.constexpr):
    """Which query of its head each row of a warpgroup is; rows of a head are adjacent."""
    if PACK > 1:
        row = row % (64 // PACK)
    return row


@gluon.jit
def pass_on(full, empty, step, STAGES: gl.constexpr):
    """Release the stage of a step that no row of the warpgroup sees."""
    mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
    mbarrier.arrive(empty.index(step % STAGES), count=1)


@gluon.jit
def step_keys(
    acc, m, total, p, q, q1, k_bufs, k_bufs1, v_bufs, k_full, k_empty, v_full, v_empty, turn, scratch, step, turns, n,
    position, kv_len, factor, wide, score_scale, softcap, window_left, window_right, WHICH: gl.constexpr,
    MASK: gl.constexpr, D1: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    SCALED: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PINGPONG: gl.constexpr, LATE: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of step `step` are multiplied while the values of the step before are; the softmax of these meanwhile."""
    before = (step - 1) % STAGES
    s = step % STAGES
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    zero = gl.zeros((64, BLOCK_N), gl.float32, S_LAYOUT)
    mbarrier.wait(k_full.index(s), (step // STAGES) & 1)
    if PINGPONG:
        mbarrier.wait(turn.index(WHICH), (turns & 1) ^ (1 - WHICH))
    started = warpgroup_mma(q, k_bufs.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
    if D1 > 0:
        started = warpgroup_mma(q1, k_bufs1.index(s).permute((1, 0)), started, is_async=True)
    mbarrier.wait(v_full.index(before), ((step - 1) // STAGES) & 1)
    pending = warpgroup_mma(p, v_bufs.index(before), acc, is_async=True)
    if PINGPONG:
        mbarrier.arrive(turn.index(1 - WHICH), count=1)
    x = warpgroup_mma_wait(1, deps=(started,))
    mbarrier.arrive(k_empty.index(s), count=1)
    x = scores(
        x, n, position, kv_len, score_scale, softcap, window_left, window_right, BLOCK_N, MASK, HAS_LEFT, HAS_RIGHT,
        HAS_SOFTCAP, SCALED, S_LAYOUT,
    )  # fmt: skip
    new = gl.maximum(m, gl.max(x, 1) * factor)
    weights = gl.exp2(x * wide - new[:, None])
    alpha = gl.exp2(m - new)
    total = total * alpha + gl.sum(weights, 1)
    after = gl.convert_layout(weights.to(v_bufs.dtype), p_layout)
    if LATE:
        scratch.store(total)  # an effect that depends on the whole softmax: the assembler keeps the wait behind it
    # Beside the sums, what must be done before the wait (the softmax), and what must live until then (p).
    acc, p, alpha, after = warpgroup_mma_wait(0, deps=(pending, p, alpha, after))
    mbarrier.arrive(v_empty.index(before), count=1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return acc, new, total, after


@gluon.jit
def attend(
    q_buf, q_buf1, k_bufs, k_bufs1, v_bufs, q_full, q_empty, q_ready, k_full, k_empty, v_full, v_empty, turn, cleared,
    scratch, out, lse, sinks, k_scale, v_scale, cu_seqlens_q, cu_seqlens_k, seq_lens, num_seqs, q_tokens, kv_tokens,
    total_tiles, given_scale, value_scale, softcap, window_left, window_right, stride_ob, stride_ot, stride_oh,
    stride_lb, stride_lh, stride_lt, WHICH: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr,
    RAGGED: gl.constexpr, PAGE: gl.constexpr, D1: gl.constexpr, DV: gl.constexpr, WIDTH: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr, SCALED: gl.constexpr, SCALES: gl.constexpr, NARROW: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr, PINGPONG: gl.constexpr, LATE: gl.constexpr, OWN: gl.constexpr,
    PACK: gl.constexpr,
):  # fmt: skip
    """A warpgroup: 64 rows of each tile of its program."""
    MANY: gl.constexpr = 64 // PACK  # queries, each of PACK heads
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 16])
    row: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    step = 0
    done = 0
    turns = 0
    tails = 0
    zero = gl.zeros((64, BLOCK_N), gl.float32, S_LAYOUT)
    for t in range(gl.program_id(0), total_tiles, gl.num_programs(0)):
        head, sequence, block, q_start, q_len, _, kv_len = tile_of(
            t, cu_seqlens_q, cu_seqlens_k, seq_lens, num_seqs, q_tokens, kv_tokens, HEADS, RAGGED, PAGE, PACK
        )
        if block >= 0:
            low, steps, right, left = key_steps(
                block, q_len, kv_len, window_left, window_right, HAS_LEFT, HAS_RIGHT, BLOCK_N, PACK
            )
            after = 0
            if OWN:
                last_keys = low + (steps - 1) * BLOCK_N
                all_steps = steps
                before, low, steps, right, left = own_steps(
                    block * (2 * MANY) + WHICH * MANY, low, steps, q_len, kv_len, window_left, window_right, MANY,
                    HAS_LEFT, HAS_RIGHT, BLOCK_N,
                )  # fmt: skip
                after = all_steps - before - steps
                for i in range(before):
                    pass_on(k_full, k_empty, step, STAGES)
                    if i == 0 and last_keys + BLOCK_N > kv_len:
                        mbarrier.wait(v_full.index(step % STAGES), (step // STAGES) & 1)
                        clear_from(v_bufs.index(step % STAGES), kv_len - last_keys, cleared, tails & 1, WHICH, BLOCK_N)
                        tails += 1
                    pass_on(v_full, v_empty, step, STAGES)
                    step += 1
            score_scale = given_scale
            of_values = value_scale
            if SCALES > 1:
                score_scale = given_scale * gl.abs(scale_of(k_scale, head, GROUP, SCALES))
                of_values = scale_of(v_scale, head, GROUP, SCALES)
            token = block * (2 * MANY) + WHICH * MANY + within_head(gl.arange(0, 64, row), PACK)
            position = kv_len - q_len + token
            at = done % Q_STAGES * 2 + WHICH
            q = q_buf.index(at)
            q1 = q_buf1.index(at)
            mbarrier.wait(q_full.index(at), (done // Q_STAGES) & 1)
            factor = score_scale
            wide = score_scale
            if NARROW:
                q, q1, sizes = narrowed(q, q1, k_bufs, k_bufs1, q_ready.index(WHICH), done & 1, D1, row)
                factor = sizes * score_scale
                score_scale = factor[:, None]
            if SCALED or HAS_SOFTCAP:
                factor = 1.0
                wide = 1.0
            else:
                factor = gl.where(factor < TINY, TINY, factor)  # 0 times -inf is NaN
                wide = factor
                if NARROW:
                    wide = factor[:, None]
            acc = gl.zeros((64, DV), gl.float32, O_LAYOUT)
            s = step % STAGES
            mbarrier.wait(k_full.index(s), (step // STAGES) & 1)
            if PINGPONG:
                mbarrier.wait(turn.index(WHICH), (turns & 1) ^ (1 - WHICH))
            x = warpgroup_mma(q, k_bufs.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
            if D1 > 0:
                x = warpgroup_mma(q1, k_bufs1.index(s).permute((1, 0)), x, is_async=True)
            if PINGPONG:
                mbarrier.arrive(turn.index(1 - WHICH), count=1)
                turns += 1
            x = warpgroup_mma_wait(0, deps=(x,))
            mbarrier.arrive(k_empty.index(s), count=1)
            n = low + (steps - 1) * BLOCK_N
            x = scores(
                x, n, position, kv_len, score_scale, softcap, window_left, window_right, BLOCK_N, True, HAS_LEFT,
                HAS_RIGHT, HAS_SOFTCAP, SCALED, S_LAYOUT,
            )  # fmt: skip
            m = gl.maximum(gl.max(x, 1) * factor, LEAST)  # a row may see none of the last keys
            weights = gl.exp2(x * wide - m[:, None])
            total = gl.sum(weights, 1)
            p = gl.convert_layout(weights.to(v_bufs.dtype), p_layout)
            if n + BLOCK_N > kv_len:
                mbarrier.wait(v_full.index(s), (step // STAGES) & 1)
                clear_from(v_bufs.index(s), kv_len - n, cleared, tails & 1, WHICH, BLOCK_N)
                tails += 1
            step += 1
            for i in range(1, right):
                acc, m, total, p = step_keys(
                    acc, m, total, p, q, q1, k_bufs, k_bufs1, v_bufs, k_full, k_empty, v_full, v_empty, turn,
                    scratch.index(WHICH), step, turns, low + (steps - 1 - i) * BLOCK_N, position, kv_len, factor, wide,
                    score_scale, softcap, window_left, window_right, WHICH, True, D1, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP,
                    SCALED, BLOCK_N, STAGES, PINGPONG, LATE, S_LAYOUT, O_LAYOUT,
                )  # fmt: skip
                step += 1
                turns += 1
            for _ in range(right, left):
                acc, m, total, p = step_keys(
                    acc, m, total, p, q, q1, k_bufs, k_bufs1, v_bufs, k_full, k_empty, v_full, v_empty, turn,
                    scratch.index(WHICH), step, turns, 0, position, kv_len, factor, wide, score_scale, softcap,
                    window_left, window_right, WHICH, False, D1, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, SCALED, BLOCK_N,
                    STAGES, PINGPONG, LATE, S_LAYOUT, O_LAYOUT,
                )  # fmt: skip
                step += 1
                turns += 1
            if HAS_LEFT:
                for i in range(left, steps):
                    acc, m, total, p = step_keys(
                        acc, m, total, p, q, q1, k_bufs, k_bufs1, v_bufs, k_full, k_empty, v_full, v_empty, turn,
                        scratch.index(WHICH), step, turns, low + (steps - 1 - i) * BLOCK_N, position, kv_len, factor,
                        wide, score_scale, softcap, window_left, window_right, WHICH, True, D1, HAS_LEFT, HAS_RIGHT,
                        HAS_SOFTCAP, SCALED, BLOCK_N, STAGES, PINGPONG, LATE, S_LAYOUT, O_LAYOUT,
                    )  # fmt: skip
                    step += 1
                    turns += 1
            mbarrier.arrive(q_empty.index(at), count=1)
            s = (step - 1) % STAGES
            mbarrier.wait(v_full.index(s), ((step - 1) // STAGES) & 1)
            pending = warpgroup_mma(p, v_bufs.index(s), acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=(pending, p))
            mbarrier.arrive(v_empty.index(s), count=1)
            if OWN:
                for _ in range(after):
                    pass_on(k_full, k_empty, step, STAGES)
                    pass_on(v_full, v_empty, step, STAGES)
                    step += 1
            done += 1
            store_rows(
                acc, m, total, of_values, out, lse, sinks, sequence, head, token, block * (2 * MANY) + WHICH * MANY,
                q_start, q_len, stride_ob, stride_ot, stride_oh, stride_lb, stride_lh, stride_lt, DV, WIDTH, RAGGED,
                HAS_SINKS, HAS_LSE, SCALES, PACK, S_LAYOUT, O_LAYOUT,
            )  # fmt: skip


@gluon.jit
def store_rows(
    acc, m, total, of_values, out, lse, sinks, sequence, head, token, first, q_start, q_len, stride_ob, stride_ot,
    stride_oh, stride_lb, stride_lh, stride_lt, DV: gl.constexpr, WIDTH: gl.constexpr, RAGGED: gl.constexpr,
    HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, SCALES: gl.constexpr, PACK: gl.constexpr, S_LAYOUT: gl.constexpr,
    O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add the sink to the denominator, divide, write the rows that the sequence has."""
    row: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    row_s: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    MANY: gl.constexpr = 64 // PACK
    batch = sequence
    if RAGGED:
        batch = sequence * 0
    if HAS_SINKS:
        sink_of = sinks + head
        if PACK > 1:
            sink_of += gl.arange(0, 64, row_s) // MANY
        sink = gl.load(sink_of).to(gl.float32) * LOG2E
        top = gl.maximum(m, sink)
        kept = gl.exp2(m - top)
        total = total * kept + gl.exp2(sink - top)
        acc = acc * gl.convert_layout(kept, row)[:, None]
        m = top
    some = total > 0.0
    total = gl.where(some, total, 1.0)
    share = 1.0 / total
    result = acc * gl.convert_layout(share * of_values, row)[:, None]
    rows = first + within_head(gl.arange(0, 64, row), PACK)
    columns = gl.arange(0, DV, gl.SliceLayout(0, O_LAYOUT))
    out += batch.to(gl.int64) * stride_ob + q_start.to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
    where = rows.to(gl.int64) * stride_ot
    if PACK > 1:
        where += (gl.arange(0, 64, row) // MANY).to(gl.int64) * stride_oh
    kept = (rows < q_len)[:, None]
    if WIDTH < DV:
        kept = kept & (columns < WIDTH)[None, :]  # what is behind a head's values is another's
    gl.store(out + where[:, None] + columns[None, :], result.to(out.dtype.element_ty), mask=kept)
    if HAS_LSE:
        lse += batch.to(gl.int64) * stride_lb + head.to(gl.int64) * stride_lh
        value = gl.where(some, (m + gl.log2(total)) * LN2, float("-inf"))
        if PACK > 1:
            lse += (gl.arange(0, 64, row_s) // MANY).to(gl.int64) * stride_lh
        gl.store(lse + (q_start + token).to(gl.int64) * stride_lt, value, mask=token < q_len)


@gluon.jit(
    do_not_specialize=[
        "num_seqs", "q_tokens", "kv_tokens", "total", "stride_table", "page_rows_k", "page_rows_v", "rows_k",
        "rows_v", "last_page", "q_batch", "q_head_row", "q_head_column", "k_batch", "k_head_row", "k_head_column",
        "v_batch", "v_head_row", "v_head_column", "window_left", "window_right", "stride_lb", "stride_lh", "stride_lt",
    ],
    do_not_specialize_on_alignment=[
        "lse", "sinks", "k_scale", "v_scale", "cu_seqlens_q", "cu_seqlens_k", "block_table", "seq_lens",
    ],
)  # fmt: skip
def prefill_kernel(
    q_desc, q_rest, k_desc, k_rest, v_desc, out, lse, sinks, k_scale, v_scale, cu_seqlens_q, cu_seqlens_k, block_table,
    seq_lens, score_scale, value_scale, softcap, num_seqs, q_tokens, kv_tokens, total, stride_table, page_rows_k,
    page_rows_v, rows_k, rows_v, last_page, q_batch, q_head_row, q_head_column, k_batch, k_head_row, k_head_column,
    v_batch, v_head_row, v_head_column, window_left, window_right, stride_ob, stride_ot, stride_oh, stride_lb,
    stride_lh, stride_lt, HEADS: gl.constexpr, GROUP: gl.constexpr, RAGGED: gl.constexpr, PAGE: gl.constexpr,
    D0: gl.constexpr, D1: gl.constexpr, DV: gl.constexpr, WIDTH: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
    SCALED: gl.constexpr, SCALES: gl.constexpr, NARROW: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr, PINGPONG: gl.constexpr, LATE: gl.constexpr, OWN: gl.constexpr, PACK: gl.constexpr,
    MULTIPLY_WITH: gl.constexpr, CONVERT_WITH: gl.constexpr,
):  # fmt: skip
    """Programs take tiles in turns.

    Args:
        q_desc, k_desc, v_desc: descriptors of rows and columns; q_rest, k_rest: of what is beyond the first D0 columns
            of a head, D1 of them. WIDTH: columns of a head's values, of which DV are multiplied. A sequence, a head
            and a page move a tile by *_batch, *_head_row and page_rows_* rows, and by *_head_column columns. rows_k,
            rows_v: rows of the caches.
        q_tokens, kv_tokens: of a sequence in batched tensors, of all in ragged ones; of pages what a row of the block
            table has room for.
        total: tiles, some of them empty if the queries are ragged.
        SCALED: `score_scale` is not positive, so that it does not commute with the maximum.
        SCALES: 1: factors of keys and values are in `score_scale` and `value_scale`; 2: besides, `k_scale` and
            `v_scale` have one each; 3: one for each KV head.
        PACK: a tile has 128 / PACK queries of each of PACK heads that share keys; blocks of the queries' descriptors
            have as many rows as a warpgroup has queries of a head.
        OWN: a warpgroup takes only those steps of a tile that its rows see.
        NARROW: the queries are bfloat16 and become float16, as keys and values of float8 do.
    """
    q_buf = gl.allocate_shared_memory(q_desc.dtype, [2 * Q_STAGES, 64, D0], q_desc.layout)
    k_bufs = gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK_N, D0], q_desc.layout)
    v_bufs = gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK_N, DV], q_desc.layout)
    q_buf1 = q_buf
    k_bufs1 = k_bufs
    if D1 > 0:
        q_buf1 = gl.allocate_shared_memory(q_desc.dtype, [2 * Q_STAGES, 64, D1], q_rest.layout)
        k_bufs1 = gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK_N, D1], q_rest.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2 * Q_STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2 * Q_STAGES, 1], mbarrier.MBarrierLayout())
    turn = q_full  # neither is used unless it is replaced: see `language.py` for barriers that nothing uses
    q_ready = q_full
    if PINGPONG:
        turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    if NARROW:
        q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    cleared = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    scratch = gl.allocate_shared_memory(gl.float32, [2, 64], VECTOR)
    mbarrier.init(cleared, count=2)
    for w in gl.static_range(2):
        if PINGPONG:
            mbarrier.init(turn.index(w), count=1)
        if NARROW:
            mbarrier.init(q_ready.index(w), count=1)
    for w in gl.static_range(2 * Q_STAGES):
        mbarrier.init(q_full.index(w), count=1)
        mbarrier.init(q_empty.index(w), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=2)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(v_empty.index(s), count=2)
    RAW_STAGES: gl.constexpr = 2
    raw_k = gl.allocate_shared_memory(k_desc.dtype, [RAW_STAGES, BLOCK_N, D0], k_desc.layout)
    raw_k1 = raw_k
    if D1 > 0:
        raw_k1 = gl.allocate_shared_memory(k_desc.dtype, [RAW_STAGES, BLOCK_N, D1], k_rest.layout)
    raw_v = gl.allocate_shared_memory(v_desc.dtype, [RAW_STAGES, BLOCK_N, DV], v_desc.layout)
    raw_k_full = gl.allocate_shared_memory(gl.int64, [RAW_STAGES, 1], mbarrier.MBarrierLayout())
    raw_k_empty = gl.allocate_shared_memory(gl.int64, [RAW_STAGES, 1], mbarrier.MBarrierLayout())
    raw_v_full = gl.allocate_shared_memory(gl.int64, [RAW_STAGES, 1], mbarrier.MBarrierLayout())
    raw_v_empty = gl.allocate_shared_memory(gl.int64, [RAW_STAGES, 1], mbarrier.MBarrierLayout())
    for r in gl.static_range(RAW_STAGES):
        mbarrier.init(raw_k_full.index(r), count=1)
        mbarrier.init(raw_k_empty.index(r), count=1)
        mbarrier.init(raw_v_full.index(r), count=1)
        mbarrier.init(raw_v_empty.index(r), count=1)
    fence_async_shared()
    gl.warp_specialize([
        (attend, (
            q_buf, q_buf1, k_bufs, k_bufs1, v_bufs, q_full, q_empty, q_ready, k_full, k_empty, v_full, v_empty,
            turn, cleared, scratch, out, lse, sinks, k_scale, v_scale, cu_seqlens_q, cu_seqlens_k, seq_lens,
            num_seqs, q_tokens, kv_tokens, total, score_scale, value_scale, softcap, window_left, window_right,
            stride_ob, stride_ot, stride_oh, stride_lb, stride_lh, stride_lt, 0, HEADS, GROUP, RAGGED, PAGE, D1,
            DV, WIDTH, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_SINKS, HAS_LSE, SCALED, SCALES, NARROW, BLOCK_N,
            STAGES, Q_STAGES, PINGPONG, LATE, OWN, PACK,
        )),
        (attend, (
            q_buf, q_buf1, k_bufs, k_bufs1, v_bufs, q_full, q_empty, q_ready, k_full, k_empty, v_full, v_empty,
            turn, cleared, scratch, out, lse, sinks, k_scale, v_scale, cu_seqlens_q, cu_seqlens_k, seq_lens,
            num_seqs, q_tokens, kv_tokens, total, score_scale, value_scale, softcap, window_left, window_right,
            stride_ob, stride_ot, stride_oh, stride_lb, stride_lh, stride_lt, 1, HEADS, GROUP, RAGGED, PAGE, D1,
            DV, WIDTH, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_SINKS, HAS_LSE, SCALED, SCALES, NARROW, BLOCK_N,
            STAGES, Q_STAGES, PINGPONG, LATE, OWN, PACK,
        )),
        (load_tiles, (
            q_desc, q_rest, k_desc, k_rest, v_desc, q_buf, q_buf1, raw_k, raw_k1, raw_v, q_full, q_empty,
            raw_k_full, raw_k_empty, raw_v_full, raw_v_empty,
            cu_seqlens_q, cu_seqlens_k, block_table, seq_lens, num_seqs, q_tokens, kv_tokens,
            total, stride_table, page_rows_k, page_rows_v, rows_k, rows_v, last_page, q_batch, q_head_row,
            q_head_column, k_batch, k_head_row, k_head_column, v_batch, v_head_row, v_head_column, window_left,
            window_right, HEADS, GROUP, RAGGED, PAGE, D0, D1, HAS_LEFT, HAS_RIGHT, BLOCK_N, RAW_STAGES, Q_STAGES,
            PACK,
        )),
        (convert_tiles, (
            raw_k, raw_k1, raw_v, k_bufs, k_bufs1, v_bufs, raw_k_full, raw_k_empty, raw_v_full, raw_v_empty, k_full,
            k_empty, v_full, v_empty, k_scale, cu_seqlens_q, cu_seqlens_k, seq_lens, num_seqs, q_tokens, kv_tokens,
            total, window_left, window_right, HEADS, GROUP, RAGGED, PAGE, D1, HAS_LEFT, HAS_RIGHT, SCALES, BLOCK_N,
            STAGES, RAW_STAGES, PACK,
        )),
    ], [4, 1, 4], [MULTIPLY_WITH, 24, CONVERT_WITH])  # fmt: skip
