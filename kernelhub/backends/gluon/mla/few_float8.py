# mypy: ignore-errors
"""Decode of latent attention for up to 16 rows over pages in float8, for sm_90: `decode_float8.py` turned round.

A tensor core's tile has 64 rows. Here those are keys or columns of the latent, and (query token, head) are its columns:

    scores [64 keys, ROWS] = page [64, 576] x queries [576, ROWS]
    sums [512, ROWS] += page [64, 512] transposed x probabilities [64, ROWS]

Warpgroup 0 walks the even pages of a sequence and warpgroup 1 the odd ones, each with a softmax and sums of its own,
which they add up at the end. Four warps convert pages, and have loaded each half of a page since they wrote that half
of the page before. The next pair is brought into the L2 cache meanwhile. Queries, scales and what is past a sequence's
end are as in `decode_float8.py`.
"""

from __future__ import annotations

from kernelhub.backends.gluon.language import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpreted,
    warpgroup_mma,
    warpgroup_mma_wait,
    words_of,
)
from kernelhub.backends.gluon.mla.decode import LEAST, LN2, LOG2E, VECTOR, load_queries
from kernelhub.backends.gluon.mla.listed_float8 import TILE, narrow, with_scale_of_cache
from kernelhub.backends.gluon.mla.pages_float8 import (
    bring_page,
    fill_columns,
    fill_half,
    load_left,
    load_right,
    page_of,
    places_in_page,
)
from kernelhub.backends.gluon.mla.schedule import part_of_program, segment

SUMS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def convert_few(
    cache, q_half, q_rope_desc, q_left, q_right, q_rope, left, right, rope, k_left, k_right, k_rope, factors, full_q,
    ready_q, empty_q, full, empty, block_table, seq_lens, q_rows, stride_table, page_sixteens, row_sixteens, last_page,
    room, begin, end, first, last, first_at,
):  # fmt: skip
    """Every pair of pages of the part, and the queries of every sequence."""
    rows, at = places_in_page(row_sixteens)
    done = 0
    walked = 0
    place = first_at
    for sequence in range(first, last):
        kv_len, low, high, place = segment(seq_lens, sequence, place, begin, end, room)
        if low < high:
            mbarrier.wait(empty_q, (walked & 1) ^ 1)
            load_queries(q_half, q_rope_desc, sequence * q_rows, full_q, q_left, q_right, q_rope.index(0))
            pages = block_table + sequence.to(gl.int64) * stride_table
            stop = gl.minimum(kv_len, high * 128)
            count = (stop + 63) // 64
            even = page_of(pages, low * 2, count, last_page)
            odd = page_of(pages, low * 2 + 1, count, last_page)
            next_even = page_of(pages, low * 2 + 2, count, last_page)
            next_odd = page_of(pages, low * 2 + 3, count, last_page)
            limit = stop - low * 128
            a, b, c, d = load_left(cache, at, rows, even, page_sixteens, limit)
            e, f, g, h, i = load_right(cache, at, rows, even, page_sixteens, limit)
            mbarrier.wait(full_q, walked & 1)
            narrow(
                q_left.index(0),
                q_right.index(0),
                q_rope.index(0),
                left.index(0),
                right.index(0),
                rope.index(0),
                factors,
            )
            fence_async_shared()
            mbarrier.arrive(ready_q, count=1)
            for pair in range(low, high):
                phase = (done & 1) ^ 1
                limit = stop - pair * 128
                bring_page(cache, next_even, page_sixteens, limit - 128, row_sixteens)
                bring_page(cache, next_odd, page_sixteens, limit - 192, row_sixteens)
                later_even = page_of(pages, pair * 2 + 4, count, last_page)
                later_odd = page_of(pages, pair * 2 + 5, count, last_page)
                mbarrier.wait(empty.index(0), phase)
                fill_half(k_left, a, b, c, d, 0)
                fence_async_shared()
                mbarrier.arrive(full.index(0), count=1)
                a, b, c, d = load_left(cache, at, rows, odd, page_sixteens, limit - 64)
                fill_half(k_right, e, f, g, h, 0)
                fill_columns(k_rope.index(0), i)
                fence_async_shared()
                mbarrier.arrive(full.index(1), count=1)
                e, f, g, h, i = load_right(cache, at, rows, odd, page_sixteens, limit - 64)
                mbarrier.wait(empty.index(1), phase)
                fill_half(k_left, a, b, c, d, 1)
                fence_async_shared()
                mbarrier.arrive(full.index(2), count=1)
                a, b, c, d = load_left(cache, at, rows, next_even, page_sixteens, limit - 128)
                fill_half(k_right, e, f, g, h, 1)
                fill_columns(k_rope.index(1), i)
                fence_async_shared()
                mbarrier.arrive(full.index(3), count=1)
                e, f, g, h, i = load_right(cache, at, rows, next_even, page_sixteens, limit - 128)
                odd = next_odd
                next_even = later_even
                next_odd = later_odd
                done += 1
            walked += 1


@gluon.jit
def attend_few(
    q_left, q_right, q_rope, k_left, k_right, k_rope, weights, p_ready, factors, vecs, sums, sums_ready, sums_taken,
    ready_q, empty_q, full, empty, out, lse, part_out, part_lse, sinks, seq_lens, scale, value_scale, tokens, stride_ob,
    stride_ot, stride_oh, stride_lb, stride_lh, stride_lt, room, begin, end, first, last, first_at, place,
    ROWS: gl.constexpr, ODD: gl.constexpr, HEADS: gl.constexpr, CAUSAL: gl.constexpr, HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr,
):  # fmt: skip
    """A warpgroup: the even or the odd pages of every sequence."""
    TURNED: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    DOWN: gl.constexpr = gl.SliceLayout(1, TURNED)  # of keys
    OVER: gl.constexpr = gl.SliceLayout(0, TURNED)  # of rows of queries
    done = 0
    walked = 0
    at = first_at
    row = gl.arange(0, ROWS, OVER)
    for sequence in range(first, last):
        kv_len, low, high, at = segment(seq_lens, sequence, at, begin, end, room)
        if low < high:
            before = kv_len - tokens
            mbarrier.wait(ready_q, walked & 1)
            m = gl.full((ROWS,), LEAST, gl.float32, OVER)
            total = gl.zeros((64, ROWS), gl.float32, TURNED)
            acc_l = gl.zeros((256, ROWS), gl.float32, TURNED)
            acc_r = gl.zeros((256, ROWS), gl.float32, TURNED)
            for pair in range(low, high):
                phase = done & 1
                none = done >> 24  # as in `score`
                s = gl.zeros((64, ROWS), gl.float32, TURNED)
                mbarrier.wait(full.index(ODD * 2), phase)
                s = warpgroup_mma(
                    k_left.index(ODD + none), q_left.index(none).permute((1, 0)), s, use_acc=False, is_async=True
                )
                mbarrier.wait(full.index(ODD * 2 + 1), phase)
                s = warpgroup_mma(k_right.index(ODD + none), q_right.index(none).permute((1, 0)), s, is_async=True)
                s = warpgroup_mma(k_rope.index(ODD + none), q_rope.index(none).permute((1, 0)), s, is_async=True)
                s = warpgroup_mma_wait(0, deps=(s,))
                x = s * (factors.load(OVER) * scale)[None, :]
                key = pair * 128 + ODD * 64 + gl.arange(0, 64, DOWN)
                if CAUSAL:
                    x = gl.where((key - before)[:, None] <= (row // HEADS)[None, :], x, float("-inf"))
                else:
                    x = gl.where((key < kv_len)[:, None], x, float("-inf"))
                top = gl.maximum(m, gl.max(x, 0))
                alpha = gl.exp2(m - top)
                p = gl.exp2(x - top[None, :])
                total = total * alpha[None, :] + p
                m = top
                weights.index(none).store(p.to(gl.float16))
                fence_async_shared()
                mbarrier.arrive(p_ready, count=1)
                mbarrier.wait(p_ready, phase)
                acc_l = warpgroup_mma(
                    k_left.index(ODD + none).permute((1, 0)), weights.index(none), acc_l * alpha[None, :], is_async=True
                )
                acc_r = warpgroup_mma(
                    k_right.index(ODD + none).permute((1, 0)),
                    weights.index(none),
                    acc_r * alpha[None, :],
                    is_async=True,
                )
                acc_l, acc_r = warpgroup_mma_wait(0, deps=(acc_l, acc_r))
                mbarrier.arrive(empty.index(ODD), count=1)
                done += 1
            summed = gl.sum(total, 0)
            if ODD:
                vecs.index(0).store(m)
                vecs.index(1).store(summed)
                sums.store(acc_l)
                mbarrier.arrive(sums_ready, count=1)
                mbarrier.wait(sums_taken, walked & 1)
                sums.store(acc_r)
                mbarrier.arrive(sums_ready, count=1)
                mbarrier.arrive(empty_q, count=1)
            else:
                mbarrier.wait(sums_ready, 0)
                of_odd = vecs.index(0).load(OVER)
                top = gl.maximum(m, of_odd)
                mine = gl.exp2(m - top)
                other = gl.exp2(of_odd - top)
                summed = summed * mine + vecs.index(1).load(OVER) * other
                acc_l = acc_l * mine[None, :] + sums.load(TURNED) * other[None, :]
                mbarrier.arrive(sums_taken, count=1)
                mbarrier.wait(sums_ready, 1)
                acc_r = acc_r * mine[None, :] + sums.load(TURNED) * other[None, :]
                mbarrier.arrive(empty_q, count=1)
                store_few(
                    acc_l, acc_r, top, summed, out, lse, part_out, part_lse, sinks, sequence, row, tokens, stride_ob,
                    stride_ot, stride_oh, stride_lb, stride_lh, stride_lt, (low == 0) & (high * 128 >= kv_len),
                    place + (low == 0).to(gl.int32) * 64, value_scale, ROWS, HEADS, HAS_SINKS,
                    HAS_LSE,
                )  # fmt: skip
            walked += 1


@gluon.jit
def store_few(
    acc_l, acc_r, m, total, out, lse, part_out, part_lse, sinks, sequence, row, tokens, stride_ob, stride_ot, stride_oh,
    stride_lb, stride_lh, stride_lt, whole, place, value_scale, ROWS: gl.constexpr, HEADS: gl.constexpr,
    HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Write the result if `whole`, or a part from row `place` on and its log2-sum-exp, as `store_rows`."""
    TURNED: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    OVER: gl.constexpr = gl.SliceLayout(0, TURNED)
    columns = gl.arange(0, 256, gl.SliceLayout(1, TURNED))
    valid = row < tokens * HEADS
    if whole:
        top = m
        kept = gl.full((ROWS,), 1.0, gl.float32, OVER)
        if HAS_SINKS:
            sink = gl.load(sinks + row % HEADS).to(gl.float32) * LOG2E
            top = gl.maximum(m, sink)
            kept = gl.exp2(m - top)
            total = total * kept + gl.exp2(sink - top)
        some = total > 0.0
        total = gl.where(some, total, 1.0)
        share = kept / total * value_scale
        where = (row // HEADS).to(gl.int64) * stride_ot + (row % HEADS).to(gl.int64) * stride_oh
        where += sequence.to(gl.int64) * stride_ob
        places = out + where[None, :] + columns[:, None]
        gl.store(places, (acc_l * share[None, :]).to(out.dtype.element_ty), mask=valid[None, :])
        gl.store(places + 256, (acc_r * share[None, :]).to(out.dtype.element_ty), mask=valid[None, :])
        if HAS_LSE:
            value = gl.where(some, (top + gl.log2(total)) * LN2, float("-inf"))
            where_lse = (row // HEADS).to(gl.int64) * stride_lt + (row % HEADS).to(gl.int64) * stride_lh
            gl.store(lse + sequence.to(gl.int64) * stride_lb + where_lse, value, mask=valid)
    else:
        some = total > 0.0
        total = gl.where(some, total, 1.0)
        share = value_scale / total
        parts = part_out + (place + row).to(gl.int64)[None, :] * 512 + columns[:, None]
        gl.store(parts, acc_l * share[None, :], mask=valid[None, :])
        gl.store(parts + 256, acc_r * share[None, :], mask=valid[None, :])
        sum_of_part = gl.where(some, m + gl.log2(total), float("-inf"))
        gl.store(part_lse + place + row, sum_of_part, mask=valid)


@gluon.jit(
    do_not_specialize=[
        "num_seqs", "tokens", "q_rows", "stride_table", "page_sixteens", "row_sixteens", "last_page", "room", "tiles",
        "stride_lb", "stride_lh", "stride_lt",
    ],
    do_not_specialize_on_alignment=["lse", "sinks", "kv_scale", "block_table", "seq_lens"],
)  # fmt: skip
def few_float8_kernel(
    q_half, q_rope_desc, cache, out, lse, part_out, part_lse, sinks, kv_scale, block_table, seq_lens, scale,
    value_scale, num_seqs, tokens, q_rows, stride_table, page_sixteens, row_sixteens, last_page, room, tiles,
    stride_ob, stride_ot, stride_oh, stride_lb, stride_lh, stride_lt, HEADS: gl.constexpr, CAUSAL: gl.constexpr,
    HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, SCALE_ON_DEVICE: gl.constexpr, MULTIPLY_WITH: gl.constexpr,
    CONVERT_WITH: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """One program per part of the work; there is one tile, of which ROWS rows of 64 are used.

    Args:
        q_half, q_rope_desc: descriptors of q as rows of 576, of ROWS x 256 and ROWS x 64 elements.

    The others as of `decode_float8_kernel`.
    """
    part = gl.program_id(0)
    parts = gl.num_programs(0)
    scale, value_scale = with_scale_of_cache(kv_scale, scale, value_scale, SCALE_ON_DEVICE)
    begin, end, first, last, first_at = part_of_program(part, parts, seq_lens, num_seqs, room)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, ROWS], gl.float16)
    q_left = gl.allocate_shared_memory(gl.bfloat16, [1, ROWS, 256], q_half.layout)
    q_right = gl.allocate_shared_memory(gl.bfloat16, [1, ROWS, 256], q_half.layout)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [1, ROWS, 64], q_rope_desc.layout)
    k_left = gl.allocate_shared_memory(gl.float16, [2, 64, 256], q_half.layout)
    k_right = gl.allocate_shared_memory(gl.float16, [2, 64, 256], q_half.layout)
    k_rope = gl.allocate_shared_memory(gl.float16, [2, 64, 64], q_rope_desc.layout)
    even = gl.allocate_shared_memory(gl.float16, [1, 64, ROWS], WEIGHTS)
    odd = gl.allocate_shared_memory(gl.float16, [1, 64, ROWS], WEIGHTS)
    sums = gl.allocate_shared_memory(gl.float32, [256, ROWS], SUMS)
    vecs = gl.allocate_shared_memory(gl.float32, [3, ROWS], VECTOR)
    full_q = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready_q = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty_q = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    sums_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    sums_taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full_q, count=1)
    mbarrier.init(ready_q, count=1)
    mbarrier.init(empty_q, count=2)
    mbarrier.init(sums_ready, count=1)
    mbarrier.init(sums_taken, count=1)
    for i in gl.static_range(4):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(p_ready.index(i), count=1)
    fence_async_shared()
    left = reinterpreted(q_left, gl.float16, k_left)
    right = reinterpreted(q_right, gl.float16, k_right)
    rope = reinterpreted(q_rope, gl.float16, k_rope)
    place = part * 128
    gl.warp_specialize([
        (attend_few, (
            left, right, rope, k_left, k_right, k_rope, even, p_ready.index(0), vecs.index(2), vecs, sums,
            sums_ready, sums_taken, ready_q, empty_q, full, empty, out, lse, part_out, part_lse, sinks, seq_lens, scale,
            value_scale, tokens, stride_ob, stride_ot, stride_oh, stride_lb, stride_lh, stride_lt, room, begin, end,
            first, last, first_at, place, ROWS, 0, HEADS, CAUSAL, HAS_SINKS, HAS_LSE,
        )),
        (attend_few, (
            left, right, rope, k_left, k_right, k_rope, odd, p_ready.index(1), vecs.index(2), vecs, sums,
            sums_ready, sums_taken, ready_q, empty_q, full, empty, out, lse, part_out, part_lse, sinks, seq_lens, scale,
            value_scale, tokens, stride_ob, stride_ot, stride_oh, stride_lb, stride_lh, stride_lt, room, begin, end,
            first, last, first_at, place, ROWS, 1, HEADS, CAUSAL, HAS_SINKS, HAS_LSE,
        )),
        (convert_few, (
            cache, q_half, q_rope_desc, q_left, q_right, q_rope, left, right, rope, words_of(k_left, 8, TILE),
            words_of(k_right, 8, TILE), words_of(k_rope, 2, TILE), vecs.index(2), full_q, ready_q, empty_q, full,
            empty, block_table, seq_lens, q_rows, stride_table, page_sixteens, row_sixteens, last_page, room,
            begin, end, first, last, first_at,
        )),
    ], [4, 4], [MULTIPLY_WITH, CONVERT_WITH])  # fmt: skip
