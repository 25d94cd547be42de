# mypy: ignore-errors
"""Where the rows of tokens go when they are sorted by expert: a place for each pair of a token and a choice.

    count: for each piece of the pairs, how many each expert has in it
    place: a pair's place = pairs of experts before its own, its expert's in pieces before, and in its piece before it

A pair is a number, token * TOP_K + rank; pairs that are left out have the place -1. `sorted_pairs` has the pair of
each place. Nothing is padded: an expert's rows follow those of the expert before. No program waits for another and
none adds to what another wrote, so the order is the same every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ADDED = tl.constexpr(8192)  # counts of pieces that a program adds up at once
_VARYING = ["pairs", "pieces", "num_global", "stride_it", "stride_ik", "stride_em"]
_METADATA = [
    *("topk_ids", "expert_map", "counts", "places", "sorted_pairs"),
    *("tile_experts", "tile_rows", "tile_ends", "num_tiles"),
]


@triton.jit
def _experts_of(
    topk_ids, expert_map, pair, pairs, num_global, stride_it, stride_ik, stride_em, TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr, HAS_MAP: tl.constexpr,
):  # fmt: skip
    """Local experts of pairs; EXPERTS for choices that are left out and for pairs that are none."""
    token = (pair // TOP_K).to(tl.int64)
    expert = tl.load(topk_ids + token * stride_it + pair % TOP_K * stride_ik, pair < pairs, other=-1)
    if HAS_MAP:
        known = (expert >= 0) & (expert < num_global)
        expert = tl.load(expert_map + expert * stride_em, known, other=-1)
    return tl.where((expert >= 0) & (expert < EXPERTS), expert, EXPERTS)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_METADATA[:3])
def count_kernel(
    topk_ids, expert_map, counts, pairs, num_global, stride_it, stride_ik, stride_em, TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, HAS_MAP: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Counts [pieces, EXPERTS_PAD]."""
    pair = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    expert = _experts_of(
        topk_ids, expert_map, pair, pairs, num_global, stride_it, stride_ik, stride_em, TOP_K, EXPERTS, HAS_MAP
    )
    found = tl.histogram(expert, EXPERTS_PAD, mask=expert < EXPERTS)
    tl.store(counts + tl.program_id(0) * EXPERTS_PAD + tl.arange(0, EXPERTS_PAD), found)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_METADATA)
def place_kernel(
    topk_ids, expert_map, counts, places, sorted_pairs, tile_experts, tile_rows, tile_ends, num_tiles, pairs, pieces,
    num_global, stride_it, stride_ik, stride_em, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr,
    HAS_MAP: tl.constexpr, HAS_COUNTS: tl.constexpr, BM: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program per piece. Without HAS_COUNTS each counts for itself, BLOCK pairs at once."""
    own = tl.program_id(0)
    expert = tl.arange(0, EXPERTS_PAD)
    if HAS_COUNTS:
        ADDED: tl.constexpr = _ADDED // EXPERTS_PAD
        all_counts = tl.zeros((ADDED, EXPERTS_PAD), dtype=tl.int32)
        counts_before = tl.zeros((ADDED, EXPERTS_PAD), dtype=tl.int32)
        for start in range(0, pieces, ADDED):
            piece = start + tl.arange(0, ADDED)
            found = tl.load(counts + piece[:, None] * EXPERTS_PAD + expert[None, :], (piece < pieces)[:, None], other=0)
            all_counts += found
            counts_before += tl.where((piece < own)[:, None], found, 0)
        total = tl.sum(all_counts, 0)
        before = tl.sum(counts_before, 0)
    else:
        total = tl.zeros((EXPERTS_PAD,), dtype=tl.int32)
        before = tl.zeros((EXPERTS_PAD,), dtype=tl.int32)
        for start in range(0, pairs, BLOCK):
            chosen = _experts_of(
                topk_ids, expert_map, start + tl.arange(0, BLOCK), pairs, num_global, stride_it, stride_ik, stride_em,
                TOP_K, EXPERTS, HAS_MAP,
            )  # fmt: skip
            found = tl.histogram(chosen, EXPERTS_PAD, mask=chosen < EXPERTS)
            total += found
            before += tl.where(start + BLOCK <= own * PIECE, found, 0)
        if own * PIECE % BLOCK > 0:
            earlier = own * PIECE // BLOCK * BLOCK + tl.arange(0, BLOCK)
            chosen = _experts_of(
                topk_ids, expert_map, earlier, pairs, num_global, stride_it, stride_ik, stride_em, TOP_K, EXPERTS,
                HAS_MAP,
            )  # fmt: skip
            before += tl.histogram(chosen, EXPERTS_PAD, mask=(chosen < EXPERTS) & (earlier < own * PIECE))
    begin = tl.cumsum(total, 0) - total
    pair = own * PIECE + tl.arange(0, PIECE)
    mine = _experts_of(
        topk_ids, expert_map, pair, pairs, num_global, stride_it, stride_ik, stride_em, TOP_K, EXPERTS, HAS_MAP
    )
    same = (mine[:, None] == mine[None, :]) & (pair[:, None] < pair[None, :])
    rank = tl.sum(same.to(tl.int32), 0)
    place = tl.gather(begin + before, tl.minimum(mine, EXPERTS_PAD - 1), 0) + rank
    tl.store(places + pair, tl.where(mine < EXPERTS, place, -1), pair < pairs)
    tl.store(sorted_pairs + place, pair, mine < EXPERTS)
    tiles = (total + BM - 1) // BM
    at = tl.cumsum(tiles, 0) - tiles
    for tile in range(own, tl.max(tiles, 0), pieces):  # programs share the list of tiles out
        there = tile < tiles
        tl.store(tile_experts + at + tile, expert, there)
        tl.store(tile_rows + at + tile, begin + tile * BM, there)
        tl.store(tile_ends + at + tile, begin + total, there)
    if own == 0:
        tl.store(num_tiles, tl.sum(tiles, 0))
