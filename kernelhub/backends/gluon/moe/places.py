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

# Pairs that a program compares with those of its piece at once, and pieces whose counts it adds up at once.
_COMPARED = tl.constexpr(32)
_ADDED = tl.constexpr(32)
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
    found = tl.histogram(expert, EXPERTS_PAD)
    tl.store(counts + tl.program_id(0) * EXPERTS_PAD + tl.arange(0, EXPERTS_PAD), found)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_METADATA)
def place_kernel(
    topk_ids, expert_map, counts, places, sorted_pairs, tile_experts, tile_rows, tile_ends, num_tiles, pairs, pieces,
    num_global, stride_it, stride_ik, stride_em, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr,
    HAS_MAP: tl.constexpr, HAS_COUNTS: tl.constexpr, BM: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """A program per piece; the first also lists the tiles of BM rows. Without HAS_COUNTS each counts for itself."""
    own = tl.program_id(0)
    expert = tl.arange(0, EXPERTS_PAD)  # one more than there are, at least
    total = tl.zeros((EXPERTS_PAD,), dtype=tl.int32)
    before = tl.zeros((EXPERTS_PAD,), dtype=tl.int32)
    if HAS_COUNTS:
        for start in range(0, pieces, _ADDED):
            piece = start + tl.arange(0, _ADDED)
            found = tl.load(counts + piece[:, None] * EXPERTS_PAD + expert[None, :], (piece < pieces)[:, None], other=0)
            total += tl.sum(found, 0)
            before += tl.sum(tl.where((piece < own)[:, None], found, 0), 0)
    else:
        for piece in range(pieces):
            found = tl.histogram(
                _experts_of(
                    topk_ids, expert_map, piece * PIECE + tl.arange(0, PIECE), pairs, num_global, stride_it, stride_ik,
                    stride_em, TOP_K, EXPERTS, HAS_MAP,
                ), EXPERTS_PAD,
            )  # fmt: skip
            total += found
            before += tl.where(piece < own, found, 0)
    total = tl.where(expert < EXPERTS, total, 0)
    begin = tl.cumsum(total, 0) - total
    pair = own * PIECE + tl.arange(0, PIECE)
    mine = _experts_of(
        topk_ids, expert_map, pair, pairs, num_global, stride_it, stride_ik, stride_em, TOP_K, EXPERTS, HAS_MAP
    )
    rank = tl.zeros((PIECE,), dtype=tl.int32)
    for start in tl.static_range(0, PIECE, _COMPARED):  # so that all are loaded at once
        other = own * PIECE + start + tl.arange(0, _COMPARED)
        same = mine[:, None] == _experts_of(
            topk_ids, expert_map, other, pairs, num_global, stride_it, stride_ik, stride_em, TOP_K, EXPERTS, HAS_MAP
        )[None, :]  # fmt: skip
        rank += tl.sum((same & (other[None, :] < pair[:, None])).to(tl.int32), 1)
    place = tl.gather(begin + before, mine, 0) + rank
    tl.store(places + pair, tl.where(mine < EXPERTS, place, -1), pair < pairs)
    tl.store(sorted_pairs + place, pair, mine < EXPERTS)
    if own == 0:
        tiles = (total + BM - 1) // BM
        at = tl.cumsum(tiles, 0) - tiles
        tl.store(num_tiles, tl.sum(tiles, 0))
        for tile in range(tl.max(tiles, 0)):
            there = tile < tiles
            tl.store(tile_experts + at + tile, expert, there)
            tl.store(tile_rows + at + tile, begin + tile * BM, there)
            tl.store(tile_ends + at + tile, begin + total, there)
