# mypy: ignore-errors
"""Decode of latent attention over pages of 64 tokens in float8, for sm_90: `decode.py` with pages that are converted.

Four warps load half of a page into registers and write it as float16 (`pages_float8.py`) once the half is released that
it goes into; then they load the next. Halves of a pair come in the order in which they are released and needed:

    left half of the even page | right of odd, rotary part | right of even, rotary part | left of odd

Queries become float16, too, each row over the power of two of its largest element; the rows' powers go into the scores,
and the cache's scale into scores and results.
"""

from __future__ import annotations

from kernelhub.backends.gluon.language import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    words_of,
)
from kernelhub.backends.gluon.mla.decode import CONVERTED_PAGES, attend_even, attend_odd, load_queries, shared_memory
from kernelhub.backends.gluon.mla.listed_float8 import TILE, narrow, narrowed_queries, with_scale_of_cache
from kernelhub.backends.gluon.mla.pages_float8 import (
    fill_columns,
    fill_half,
    load_left,
    load_right,
    page_of,
    places_in_page,
)
from kernelhub.backends.gluon.mla.schedule import part_of_program, segment


@gluon.jit
def arrive_at(full, PIECES: gl.constexpr):
    """What was written before is there, for the warpgroups that multiply."""
    fence_async_shared()
    for piece in gl.static_range(PIECES):
        mbarrier.arrive(full.index(piece), count=1)


@gluon.jit
def convert_pages(
    cache, q_half, q_rope_desc, q_left, q_right, q_rope, left, right, rope, k_left, k_right, k_rope, factors, full_q,
    ready_q, empty_q, full_l0, full_l1, full_r0, full_r1, empty_l, empty_r, block_table, seq_lens, q_row, q_rows,
    stride_table, page_sixteens, row_sixteens, last_page, room, begin, end, first, last, first_at,
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
            load_queries(q_half, q_rope_desc, sequence * q_rows + q_row, full_q, q_left, q_right, q_rope)
            pages = block_table + sequence.to(gl.int64) * stride_table
            stop = gl.minimum(kv_len, high * 128)
            count = (stop + 63) // 64
            even = page_of(pages, low * 2, count, last_page)
            odd = page_of(pages, low * 2 + 1, count, last_page)
            limit = stop - low * 128
            a, b, c, d = load_left(cache, at, rows, even, page_sixteens, limit)
            mbarrier.wait(full_q, walked & 1)
            narrow(q_left.index(0), q_right.index(0), q_rope, left.index(0), right.index(0), rope, factors)
            fence_async_shared()
            mbarrier.arrive(ready_q, count=1)
            for pair in range(low, high):
                phase = (done & 1) ^ 1
                limit = stop - pair * 128
                next_even = page_of(pages, pair * 2 + 2, count, last_page)
                next_odd = page_of(pages, pair * 2 + 3, count, last_page)
                mbarrier.wait(empty_l.index(0), phase)
                fill_half(k_left, a, b, c, d, 0)
                arrive_at(full_l0, 4)
                a, b, c, d, rotary = load_right(cache, at, rows, odd, page_sixteens, limit - 64)
                mbarrier.wait(empty_r.index(1), phase)
                fill_half(k_right, a, b, c, d, 1)
                fill_columns(k_rope.index(1), rotary)
                arrive_at(full_r1, 5)
                a, b, c, d, rotary = load_right(cache, at, rows, even, page_sixteens, limit)
                mbarrier.wait(empty_r.index(0), phase)
                fill_half(k_right, a, b, c, d, 0)
                fill_columns(k_rope.index(0), rotary)
                arrive_at(full_r0, 5)
                a, b, c, d = load_left(cache, at, rows, odd, page_sixteens, limit - 64)
                mbarrier.wait(empty_l.index(1), phase)
                fill_half(k_left, a, b, c, d, 1)
                arrive_at(full_l1, 4)
                a, b, c, d = load_left(cache, at, rows, next_even, page_sixteens, limit - 128)
                even = next_even
                odd = next_odd
                done += 1
            walked += 1


@gluon.jit(
    do_not_specialize=[
        "num_seqs", "tokens", "q_rows", "stride_table", "page_sixteens", "row_sixteens", "last_page", "room", "tiles",
        "stride_lb", "stride_lh", "stride_lt",
    ],
    do_not_specialize_on_alignment=["lse", "sinks", "kv_scale", "block_table", "seq_lens"],
)  # fmt: skip
def decode_float8_kernel(
    q_half, q_rope_desc, cache, out, lse, part_out, part_lse, sinks, kv_scale, block_table, seq_lens, scale,
    value_scale, num_seqs, tokens, q_rows, stride_table, page_sixteens, row_sixteens, last_page, room, tiles,
    stride_ob, stride_ot, stride_oh, stride_lb, stride_lh, stride_lt, HEADS: gl.constexpr, CAUSAL: gl.constexpr,
    HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, SCALE_ON_DEVICE: gl.constexpr, MULTIPLY_WITH: gl.constexpr,
    CONVERT_WITH: gl.constexpr,
):  # fmt: skip
    """One program per part of the work on a tile of 64 rows; the tiles of a part run together and share pages in L2.

    Args:
        cache: rows of 576 e4m3 as words of four, 16 * `row_sixteens` bytes apart, in pages 16 * `page_sixteens` bytes
            apart.
        kv_scale: where SCALE_ON_DEVICE, the cache's scale; else it is in `scale` and `value_scale`.
        MULTIPLY_WITH, CONVERT_WITH: registers of a thread of the second warpgroup, and of one that converts.

    The others as of `decode_kernel`.
    """
    tile = gl.program_id(0) % tiles
    part = gl.program_id(0) // tiles
    parts = gl.num_programs(0) // tiles
    scale, value_scale = with_scale_of_cache(kv_scale, scale, value_scale, SCALE_ON_DEVICE)
    begin, end, first, last, first_at = part_of_program(part, parts, seq_lens, num_seqs, room)
    (
        q_left, q_right, q_rope, k_left, k_right, k_rope, p_even, vecs, hidden, full_q, empty_q, full_l0, full_l1,
        full_r0, full_r1, empty_l, empty_r, hidden_ready, bars,
    ) = shared_memory(q_half, q_rope_desc, 1, CONVERTED_PAGES)  # fmt: skip
    ready_q, left, right, rope = narrowed_queries(q_left, q_right, q_rope, k_left, k_right, k_rope)
    row = tile * 64
    slot_rows = tiles * 64
    place = part * 2 * slot_rows + row
    gl.warp_specialize([
        (attend_even, (
            left, right, rope, k_left, k_right, k_rope, p_even, vecs, bars, ready_q, empty_q, full_l0, full_r0,
            empty_l, empty_r, hidden, hidden_ready, out, lse, part_out, part_lse, sinks, seq_lens, scale, value_scale,
            row, tokens, stride_ob, stride_ot, stride_oh, stride_lb, stride_lh, stride_lt, room, begin, end, first,
            last, first_at, place, slot_rows, HEADS, CAUSAL, HAS_SINKS, HAS_LSE, CONVERTED_PAGES,
        )),
        (attend_odd, (
            left, right, rope, k_left, k_right, k_rope, p_even, vecs, bars, ready_q, empty_q, full_l1, full_r1,
            empty_l, empty_r, hidden, hidden_ready, out, lse, part_out, part_lse, sinks, seq_lens, scale, value_scale,
            row, tokens, stride_ob, stride_ot, stride_oh, stride_lb, stride_lh, stride_lt, room, begin, end, first,
            last, first_at, place, slot_rows, HEADS, CAUSAL, HAS_SINKS, HAS_LSE, CONVERTED_PAGES,
        )),
        (convert_pages, (
            cache, q_half, q_rope_desc, q_left, q_right, q_rope, left, right, rope, words_of(k_left, 8, TILE),
            words_of(k_right, 8, TILE), words_of(k_rope, 2, TILE), hidden.index(2), full_q, ready_q, empty_q, full_l0,
            full_l1, full_r0, full_r1, empty_l, empty_r, block_table, seq_lens, row, q_rows, stride_table,
            page_sixteens, row_sixteens, last_page, room, begin, end, first, last, first_at,
        )),
    ], [4, 4], [MULTIPLY_WITH, CONVERT_WITH])  # fmt: skip
