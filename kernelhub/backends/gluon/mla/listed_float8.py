# mypy: ignore-errors
"""Decode of latent attention over lists of tokens whose latents are float8: `listed.py` with rows that are converted.

Tensor cores multiply float16, which holds e4m3 exactly. There is no memory left for rows of float8, so four warps keep
them in registers: they load half of 64 rows, in 16 bytes a thread, before the half is released that these rows go
into, and write them there as float16. A half goes 64 columns at a time; where one has been written, 64 columns of the
next half are loaded. The rows of the next pair's entries are looked up in three steps meanwhile:

    left half of even entries | right of odd | right of even           | left of odd
    next entries              |              | the pages of the next   | their rows

Queries become float16, too, each row over the power of two of its largest element (`attention/converting.py`), in the
place where TMA wrote them; the rows' powers go into the scores, and the cache's scale into scores and results.
"""

from __future__ import annotations

from kernelhub.backends.gluon.language import (
    fence_async_shared,
    gl,
    gluon,
    halves_of_float8,
    mbarrier,
    reinterpreted,
    words_of,
)
from kernelhub.backends.gluon.mla.decode import CONVERTED, attend_even, attend_odd, load_queries, shared_memory
from kernelhub.backends.gluon.mla.listed import owner_of
from kernelhub.backends.gluon.mla.schedule import part_of_program, segment

# 64 rows of 64 bytes. Eight threads write 128 bytes that lie in all banks.
WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
ENTRY = gl.constexpr(gl.SliceLayout(1, WORDS))
ACROSS = gl.constexpr(gl.SliceLayout(0, WORDS))
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
QUERIES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
QUERY = gl.constexpr(gl.SliceLayout(1, QUERIES))
ROPE = gl.constexpr(512)  # the column where the rotary part begins


@gluon.jit
def tokens_of(lists, first, end, limit):
    """64 entries of a list, those before `end`; -1 for what the query does not see."""
    entry = first + gl.arange(0, 64, ENTRY)
    token = gl.load(lists + entry, mask=entry < end, other=-1)
    return gl.where((token >= 0) & (token < limit), token, -1)


@gluon.jit
def pages_of(pages, token, last_page, PAGE: gl.constexpr):
    """The pages of tokens."""
    page = gl.load(pages + token // PAGE, mask=token >= 0, other=0)
    return gl.minimum(gl.maximum(page, 0), last_page)


@gluon.jit
def places_of(token, page, page_units, row_units, PAGE: gl.constexpr):
    """Where the rows of tokens begin in the cache, in units that 32 bits suffice for; -1 for none."""
    return gl.where(token >= 0, page * page_units + token % PAGE * row_units, -1)


@gluon.jit
def load_piece(cache, unit, places, COLUMN: gl.constexpr):
    """64 columns of 64 rows as words of four."""
    words = COLUMN // 4 + gl.arange(0, 16, ACROSS)
    rows = places.to(gl.int64) * (unit * 4)
    return gl.load(cache + rows[:, None] + words[None, :], mask=(places >= 0)[:, None], other=0)


@gluon.jit
def write_piece(words, raw, full):
    """Those columns as float16, for the warpgroups that multiply."""
    low, high = halves_of_float8(raw)
    words.store(gl.join(low, high).reshape([64, 32]))
    fence_async_shared()
    mbarrier.arrive(full, count=1)


@gluon.jit
def write_left(words, half, full, a, b, c, d, cache, unit, after, COLUMN: gl.constexpr):
    """Write the left half of 64 rows, and load half of the rows at `after`, from COLUMN on."""
    write_piece(words.index(half * 4), a, full.index(0))
    a = load_piece(cache, unit, after, COLUMN)
    write_piece(words.index(half * 4 + 1), b, full.index(1))
    b = load_piece(cache, unit, after, COLUMN + 64)
    write_piece(words.index(half * 4 + 2), c, full.index(2))
    c = load_piece(cache, unit, after, COLUMN + 128)
    write_piece(words.index(half * 4 + 3), d, full.index(3))
    d = load_piece(cache, unit, after, COLUMN + 192)
    return a, b, c, d


@gluon.jit
def write_right(words, rope, half, full, a, b, c, d, cache, unit, rows, after, COLUMN: gl.constexpr):
    """The same for the right half and the rotary part, which is loaded here."""
    write_piece(words.index(half * 4), a, full.index(0))
    a = load_piece(cache, unit, rows, ROPE)
    write_piece(words.index(half * 4 + 1), b, full.index(1))
    b = load_piece(cache, unit, after, COLUMN)
    write_piece(words.index(half * 4 + 2), c, full.index(2))
    c = load_piece(cache, unit, after, COLUMN + 64)
    write_piece(words.index(half * 4 + 3), d, full.index(3))
    d = load_piece(cache, unit, after, COLUMN + 128)
    write_piece(rope.index(half), a, full.index(4))
    a = load_piece(cache, unit, after, COLUMN + 192)
    return b, c, d, a


@gluon.jit
def largest_of(buf, largest):
    """The largest size in each row of 64 columns, or `largest`."""
    return gl.maximum(largest, gl.max(gl.abs(buf.load(QUERIES).to(gl.float32)), 1))


@gluon.jit
def narrow_piece(buf, into, inverse):
    into.store((buf.load(QUERIES).to(gl.float32) * inverse[:, None]).to(gl.float16))


@gluon.jit
def narrow(q_left, q_right, q_rope, left, right, rope, factors):
    """Queries as float16 in the place where they were, and a power of two for each row to multiply its scores by."""
    largest = gl.max(gl.abs(q_rope.load(QUERIES).to(gl.float32)), 1)
    for piece in gl.static_range(4):
        largest = largest_of(q_left.slice(piece * 64, 64, dim=1), largest)
        largest = largest_of(q_right.slice(piece * 64, 64, dim=1), largest)
    bits = largest.to(gl.int32, bitcast=True) & 0x7F800000
    bits = gl.minimum(gl.maximum(bits, 0x00800000), 0x7E800000)  # of which the inverse is a normal number, too
    inverse = (0x7F000000 - bits).to(gl.float32, bitcast=True)
    for piece in gl.static_range(4):
        narrow_piece(q_left.slice(piece * 64, 64, dim=1), left.slice(piece * 64, 64, dim=1), inverse)
        narrow_piece(q_right.slice(piece * 64, 64, dim=1), right.slice(piece * 64, 64, dim=1), inverse)
    narrow_piece(q_rope, rope, inverse)
    factors.store(bits.to(gl.float32, bitcast=True))


@gluon.jit
def convert_rows(
    cache, q_half, q_rope_desc, q_left, q_right, q_rope, left, right, rope, k_left, k_right, k_rope, hidden,
    hidden_ready, full_q, ready_q, empty_q, full_l0, full_l1, full_r0, full_r1, empty_l, empty_r, lists, block_table,
    seq_lens, cu_seqlens_q, q_row, q_rows, num_seqs, tokens, stride_lists, stride_table, unit, page_units, row_units,
    last_page, cache_room, room, begin, end, first, last, first_at, CAUSAL: gl.constexpr, RAGGED: gl.constexpr,
    PAGE: gl.constexpr,
):  # fmt: skip
    """Every pair of 64 entries of the part, and the queries of every list."""
    done = 0
    walked = 0
    at = first_at
    for query in range(first, last):
        _, low, high, at = segment(None, query, at, begin, end, room)
        if low < high:
            mbarrier.wait(empty_q, (walked & 1) ^ 1)
            load_queries(q_half, q_rope_desc, query * q_rows + q_row, full_q, q_left, q_right, q_rope)
            sequence, limit = owner_of(query, tokens, seq_lens, cu_seqlens_q, num_seqs, cache_room, CAUSAL, RAGGED)
            own = lists + query.to(gl.int64) * stride_lists
            pages = block_table + sequence.to(gl.int64) * stride_table
            stop = gl.minimum(room, high * 128)
            token = tokens_of(own, low * 128, stop, limit)
            even = places_of(token, pages_of(pages, token, last_page, PAGE), page_units, row_units, PAGE)
            token = tokens_of(own, low * 128 + 64, stop, limit)
            odd = places_of(token, pages_of(pages, token, last_page, PAGE), page_units, row_units, PAGE)
            a = load_piece(cache, unit, even, 0)
            b = load_piece(cache, unit, even, 64)
            c = load_piece(cache, unit, even, 128)
            d = load_piece(cache, unit, even, 192)
            mbarrier.wait(full_q, walked & 1)
            narrow(q_left.index(0), q_right.index(0), q_rope, left.index(0), right.index(0), rope, hidden.index(2))
            fence_async_shared()
            mbarrier.arrive(ready_q, count=1)
            for pair in range(low, high):
                phase = (done & 1) ^ 1
                next_even = tokens_of(own, pair * 128 + 128, stop, limit)
                next_odd = tokens_of(own, pair * 128 + 192, stop, limit)
                mbarrier.wait(empty_l.index(0), phase)
                hidden.index(0).store(gl.where(even >= 0, 0.0, float("-inf")))
                mbarrier.arrive(hidden_ready.index(0), count=1)
                a, b, c, d = write_left(k_left, 0, full_l0, a, b, c, d, cache, unit, odd, 256)
                mbarrier.wait(empty_r.index(1), phase)
                hidden.index(1).store(gl.where(odd >= 0, 0.0, float("-inf")))
                mbarrier.arrive(hidden_ready.index(1), count=1)
                a, b, c, d = write_right(k_right, k_rope, 1, full_r1, a, b, c, d, cache, unit, odd, even, 256)
                even_page = pages_of(pages, next_even, last_page, PAGE)
                odd_page = pages_of(pages, next_odd, last_page, PAGE)
                mbarrier.wait(empty_r.index(0), phase)
                a, b, c, d = write_right(k_right, k_rope, 0, full_r0, a, b, c, d, cache, unit, even, odd, 0)
                even = places_of(next_even, even_page, page_units, row_units, PAGE)
                odd = places_of(next_odd, odd_page, page_units, row_units, PAGE)
                mbarrier.wait(empty_l.index(1), phase)
                a, b, c, d = write_left(k_left, 1, full_l1, a, b, c, d, cache, unit, even, 0)
                done += 1
            walked += 1


@gluon.jit
def with_scale_of_cache(kv_scale, scale, value_scale, SCALE_ON_DEVICE: gl.constexpr):
    """The factors of scores and of results, times the cache's scale where that is on the device."""
    if SCALE_ON_DEVICE:
        of_cache = gl.load(kv_scale)
        scale = scale * of_cache
        value_scale = value_scale * of_cache
    return scale, value_scale


@gluon.jit
def narrowed_queries(q_left, q_right, q_rope, k_left, k_right, k_rope):
    """A barrier for queries that are float16, and where they are then: in the place in which they came as bfloat16."""
    ready_q = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready_q, count=1)
    fence_async_shared()
    left = reinterpreted(q_left, gl.float16, k_left)
    right = reinterpreted(q_right, gl.float16, k_right)
    rope = reinterpreted(q_rope, gl.float16, k_rope)
    return ready_q, left, right, rope


@gluon.jit(
    do_not_specialize=[
        "num_queries", "num_seqs", "tokens", "q_rows", "stride_lists", "stride_table", "unit", "page_units",
        "row_units", "last_page", "cache_room", "room", "tiles", "stride_lb", "stride_lh", "stride_lt",
    ],
    do_not_specialize_on_alignment=["lse", "sinks", "kv_scale", "lists", "block_table", "seq_lens", "cu_seqlens_q"],
)  # fmt: skip
def listed_float8_kernel(
    q_half, q_rope_desc, cache, out, lse, part_out, part_lse, sinks, kv_scale, lists, block_table, seq_lens,
    cu_seqlens_q, scale, value_scale, num_queries, num_seqs, tokens, q_rows, stride_lists, stride_table, unit,
    page_units, row_units, last_page, cache_room, room, tiles, stride_ob, stride_ot, stride_oh, stride_lb, stride_lh,
    stride_lt, HEADS: gl.constexpr, CAUSAL: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
    RAGGED: gl.constexpr, PAGE: gl.constexpr, SCALE_ON_DEVICE: gl.constexpr, MULTIPLY_WITH: gl.constexpr,
    CONVERT_WITH: gl.constexpr,
):  # fmt: skip
    """One program per part of the work on a tile of 64 heads.

    Args:
        cache: rows of 576 e4m3 as words of four, `row_units` units apart, in pages `page_units` apart.
        unit: in 16 bytes.
        kv_scale: where SCALE_ON_DEVICE, the cache's scale; else it is in `scale` and `value_scale`.
        MULTIPLY_WITH, CONVERT_WITH: registers of a thread of the second warpgroup, and of one that converts.

    The others as of `listed_kernel`.
    """
    tile = gl.program_id(0) % tiles
    part = gl.program_id(0) // tiles
    parts = gl.num_programs(0) // tiles
    if RAGGED:
        num_queries = gl.minimum(gl.maximum(gl.load(cu_seqlens_q + num_seqs), 0), num_queries)
    scale, value_scale = with_scale_of_cache(kv_scale, scale, value_scale, SCALE_ON_DEVICE)
    begin, end, first, last, first_at = part_of_program(part, parts, None, num_queries, room)
    (
        q_left, q_right, q_rope, k_left, k_right, k_rope, p_even, vecs, hidden, full_q, empty_q, full_l0, full_l1,
        full_r0, full_r1, empty_l, empty_r, hidden_ready, bars,
    ) = shared_memory(q_half, q_rope_desc, 1, CONVERTED)  # fmt: skip
    ready_q, left, right, rope = narrowed_queries(q_left, q_right, q_rope, k_left, k_right, k_rope)
    row = tile * 64
    slot_rows = tiles * 64
    place = part * 2 * slot_rows + row
    gl.warp_specialize([
        (attend_even, (
            left, right, rope, k_left, k_right, k_rope, p_even, vecs, bars, ready_q, empty_q, full_l0, full_r0,
            empty_l, empty_r, hidden, hidden_ready, out, lse, part_out, part_lse, sinks, None, scale, value_scale, row,
            1, stride_ob, stride_ot, stride_oh, stride_lb, stride_lh, stride_lt, room, begin, end, first, last,
            first_at, place, slot_rows, HEADS, False, HAS_SINKS, HAS_LSE, CONVERTED,
        )),
        (attend_odd, (
            left, right, rope, k_left, k_right, k_rope, p_even, vecs, bars, ready_q, empty_q, full_l1, full_r1,
            empty_l, empty_r, hidden, hidden_ready, out, lse, part_out, part_lse, sinks, None, scale, value_scale, row,
            1, stride_ob, stride_ot, stride_oh, stride_lb, stride_lh, stride_lt, room, begin, end, first, last,
            first_at, place, slot_rows, HEADS, False, HAS_SINKS, HAS_LSE, CONVERTED,
        )),
        (convert_rows, (
            cache, q_half, q_rope_desc, q_left, q_right, q_rope, left, right, rope, words_of(k_left, 8, TILE),
            words_of(k_right, 8, TILE), words_of(k_rope, 2, TILE), hidden, hidden_ready, full_q, ready_q, empty_q,
            full_l0, full_l1, full_r0, full_r1, empty_l, empty_r, lists, block_table, seq_lens, cu_seqlens_q, row,
            q_rows, num_seqs, tokens, stride_lists, stride_table, unit, page_units, row_units, last_page, cache_room,
            room, begin, end, first, last, first_at, CAUSAL, RAGGED, PAGE,
        )),
    ], [4, 4], [MULTIPLY_WITH, CONVERT_WITH])  # fmt: skip
