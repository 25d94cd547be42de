# mypy: ignore-errors
"""Decode of latent attention over lists of tokens, for sm_90: `decode.py` with rows that are gathered.

A query token is what a sequence is there, and the entries of its list are the keys, 64 of them in the place of a page.
Four warps look an entry's page up and copy its row by cp.async; rows that the query does not see come as zeros, and a
vector beside them hides their scores. They fill the four buffers in the order in which they are released and needed:

    left half of even entries, right of odd, right of even, left of odd

Warpgroup 0 releases the last once it has issued the next scores, which need the first and the third.
"""

from __future__ import annotations

from kernelhub.backends.gluon.language import (
    copy_arrive,
    copy_rows,
    gl,
    gluon,
    mbarrier,
)
from kernelhub.backends.gluon.mla.decode import GATHERED, attend_even, attend_odd, load_queries, shared_memory
from kernelhub.backends.gluon.mla.schedule import part_of_program, segment

COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
ENTRY = gl.constexpr(gl.SliceLayout(1, COPIED))
ACROSS = gl.constexpr(gl.SliceLayout(0, COPIED))
COPIERS = gl.constexpr(128)  # threads that copy rows, each of which arrives


@gluon.jit
def owner_of(query, tokens, seq_lens, cu_seqlens_q, num_seqs, cache_room, CAUSAL: gl.constexpr, RAGGED: gl.constexpr):
    """(sequence of a query, tokens of it from its first on that the query sees)."""
    if RAGGED:
        sequence = query * 0
        high = num_seqs - 1
        while sequence < high:
            middle = (sequence + high) // 2
            if gl.load(cu_seqlens_q + middle + 1) <= query:
                sequence = middle + 1
            else:
                high = middle
        after = gl.load(cu_seqlens_q + sequence + 1) - query - 1
    else:
        sequence = query // tokens
        after = tokens - query % tokens - 1
    limit = gl.minimum(gl.maximum(gl.load(seq_lens + sequence), 0), cache_room)
    if CAUSAL:
        limit = limit - after
    return sequence, limit


@gluon.jit
def entries_of(
    lists, pages, first, room, limit, last_page, page_eights, row_eights, PAGE: gl.constexpr
):  # fmt: skip
    """Where the rows of 64 entries are in the cache, in elements, and which of them are seen."""
    entry = first + gl.arange(0, 64, ENTRY)
    token = gl.load(lists + entry, mask=entry < room, other=-1)
    seen = (token >= 0) & (token < limit)
    token = gl.where(seen, token, 0)
    page = gl.load(pages + token // PAGE, mask=seen, other=0)
    page = gl.minimum(gl.maximum(page, 0), last_page)
    return (page.to(gl.int64) * page_eights + (token % PAGE).to(gl.int64) * row_eights) * 8, seen


@gluon.jit
def copy_half(cache, places, seen, buf, rope_buf, full, RIGHT: gl.constexpr):
    """Half the columns of 64 rows, 64 columns at a time; with the right half the rotary part."""
    columns = gl.arange(0, 64, ACROSS)
    for piece in gl.static_range(4):
        source = cache + places[:, None] + (RIGHT * 256 + piece * 64 + columns)[None, :]
        copy_rows(buf.slice(piece * 64, 64, dim=1), source, mask=seen[:, None])
        copy_arrive(full.index(piece), increment_count=False)
    if RIGHT:
        copy_rows(rope_buf, cache + places[:, None] + (512 + columns)[None, :], mask=seen[:, None])
        copy_arrive(full.index(4), increment_count=False)


@gluon.jit
def gather_rows(
    cache, q_half, q_rope, q_left, q_right, q_rope_buf, k_left, k_right, k_rope, hidden, hidden_ready, full_q, empty_q,
    full_l0, full_l1, full_r0, full_r1, empty_l, empty_r, lists, block_table, seq_lens, cu_seqlens_q, q_row, q_rows,
    num_seqs, tokens, stride_lists, stride_table, page_eights, row_eights, last_page, cache_room, room, begin, end,
    first, last, first_at, CAUSAL: gl.constexpr, RAGGED: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Every pair of 64 entries of the part, and the queries of every list."""
    done = 0
    walked = 0
    at = first_at
    for query in range(first, last):
        _, low, high, at = segment(None, query, at, begin, end, room)
        if low < high:
            mbarrier.wait(empty_q, (walked & 1) ^ 1)
            load_queries(q_half, q_rope, query * q_rows + q_row, full_q, q_left, q_right, q_rope_buf)
            sequence, limit = owner_of(query, tokens, seq_lens, cu_seqlens_q, num_seqs, cache_room, CAUSAL, RAGGED)
            own = lists + query.to(gl.int64) * stride_lists
            pages = block_table + sequence.to(gl.int64) * stride_table
            for pair in range(low, high):
                phase = (done & 1) ^ 1
                even, seen_even = entries_of(
                    own, pages, pair * 128, room, limit, last_page, page_eights, row_eights, PAGE
                )
                odd, seen_odd = entries_of(
                    own, pages, pair * 128 + 64, room, limit, last_page, page_eights, row_eights, PAGE
                )
                mbarrier.wait(empty_l.index(0), phase)
                hidden.index(0).store(gl.where(seen_even, 0.0, float("-inf")))
                mbarrier.arrive(hidden_ready.index(0), count=1)
                copy_half(cache, even, seen_even, k_left.index(0), k_rope.index(0), full_l0, False)
                mbarrier.wait(empty_r.index(1), phase)
                hidden.index(1).store(gl.where(seen_odd, 0.0, float("-inf")))
                mbarrier.arrive(hidden_ready.index(1), count=1)
                copy_half(cache, odd, seen_odd, k_right.index(1), k_rope.index(1), full_r1, True)
                mbarrier.wait(empty_r.index(0), phase)
                copy_half(cache, even, seen_even, k_right.index(0), k_rope.index(0), full_r0, True)
                mbarrier.wait(empty_l.index(1), phase)
                copy_half(cache, odd, seen_odd, k_left.index(1), k_rope.index(1), full_l1, False)
                done += 1
            walked += 1


@gluon.jit(
    do_not_specialize=[
        "num_queries", "num_seqs", "tokens", "q_rows", "stride_lists", "stride_table", "page_eights", "row_eights",
        "last_page", "cache_room", "room", "tiles", "stride_lb", "stride_lh", "stride_lt",
    ],
    do_not_specialize_on_alignment=["lse", "sinks", "lists", "block_table", "seq_lens", "cu_seqlens_q"],
)  # fmt: skip
def listed_kernel(
    q_half, q_rope_desc, cache, out, lse, part_out, part_lse, sinks, lists, block_table, seq_lens, cu_seqlens_q, scale,
    num_queries, num_seqs, tokens, q_rows, stride_lists, stride_table, page_eights, row_eights, last_page, cache_room,
    room, tiles, stride_ob, stride_ot, stride_oh, stride_lb, stride_lh, stride_lt, HEADS: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, RAGGED: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """One program per part of the work on a tile of 64 heads.

    Args:
        q_half, q_rope_desc: descriptors of q as rows of 576, of 64 x 256 and 64 x 64 elements.
        cache: rows of 576, 8 * `row_eights` apart, in pages 8 * `page_eights` apart.
        lists: `room` tokens of its sequence for each query, in any order; entries that are no token are left out.
        tokens: queries of a sequence, of which there are `num_queries` in all; RAGGED: `cu_seqlens_q` says where those
            of each of `num_seqs` sequences begin, and what is past the last is left alone.
        q_rows: rows between two queries.
        part_out, part_lse: as of `decode_kernel`.
    """
    tile = gl.program_id(0) % tiles
    part = gl.program_id(0) // tiles
    parts = gl.num_programs(0) // tiles
    if RAGGED:
        num_queries = gl.minimum(gl.maximum(gl.load(cu_seqlens_q + num_seqs), 0), num_queries)
    begin, end, first, last, first_at = part_of_program(part, parts, None, num_queries, room)
    (
        q_left, q_right, q_rope, k_left, k_right, k_rope, p_even, vecs, hidden, full_q, empty_q, full_l0, full_l1,
        full_r0, full_r1, empty_l, empty_r, hidden_ready, bars,
    ) = shared_memory(q_half, q_rope_desc, COPIERS, GATHERED)  # fmt: skip
    row = tile * 64
    slot_rows = tiles * 64
    place = part * 2 * slot_rows + row
    gl.warp_specialize([
        (attend_even, (
            q_left, q_right, q_rope, k_left, k_right, k_rope, p_even, vecs, bars, full_q, empty_q, full_l0, full_r0,
            empty_l, empty_r, hidden, hidden_ready, out, lse, part_out, part_lse, sinks, None, scale, 1.0, row, 1,
            stride_ob, stride_ot, stride_oh, stride_lb, stride_lh, stride_lt, room, begin, end, first, last, first_at,
            place, slot_rows, HEADS, False, HAS_SINKS, HAS_LSE, GATHERED,
        )),
        (attend_odd, (
            q_left, q_right, q_rope, k_left, k_right, k_rope, p_even, vecs, bars, full_q, empty_q, full_l1, full_r1,
            empty_l, empty_r, hidden, hidden_ready, out, lse, part_out, part_lse, sinks, None, scale, 1.0, row, 1,
            stride_ob, stride_ot, stride_oh, stride_lb, stride_lh, stride_lt, room, begin, end, first, last, first_at,
            place, slot_rows, HEADS, False, HAS_SINKS, HAS_LSE, GATHERED,
        )),
        (gather_rows, (
            cache, q_half, q_rope_desc, q_left, q_right, q_rope, k_left, k_right, k_rope, hidden, hidden_ready, full_q,
            empty_q, full_l0, full_l1, full_r0, full_r1, empty_l, empty_r, lists, block_table, seq_lens, cu_seqlens_q,
            row, q_rows, num_seqs, tokens, stride_lists, stride_table, page_eights, row_eights, last_page, cache_room,
            room, begin, end, first, last, first_at, CAUSAL, RAGGED, PAGE,
        )),
    ], [4, 4], [232, 40])  # fmt: skip
