# mypy: ignore-errors
"""Where the rows of tokens go when they are sorted by expert: a place for each pair of a token and a choice.

    count (`count_kernel` of `pairs.py`): for each piece of the pairs, how many each expert has in it
    place: a pair's place = pairs of experts before its own, its expert's in pieces before, and in its piece before it

A pair is a number, token * TOP_K + rank; pairs that are left out have the place -1. `sorted_pairs` has the pair of
each place. Nothing is padded: an expert's rows follow those of the expert before. No program waits for another and
none adds to what another wrote, so the order is the same every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.shared.pairs import counts_of, experts_of, ranks_in_piece

_VARYING = ["pairs", "pieces", "num_global", "stride_it", "stride_ik", "stride_em"]
_METADATA = [
    *("topk_ids", "expert_map", "counts", "places", "sorted_pairs"),
    *("tile_experts", "tile_rows", "tile_ends", "num_tiles"),
]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_METADATA)
def place_kernel(
    topk_ids, expert_map, counts, places, sorted_pairs, tile_experts, tile_rows, tile_ends, num_tiles, pairs, pieces,
    num_global, stride_it, stride_ik, stride_em, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr,
    HAS_MAP: tl.constexpr, HAS_COUNTS: tl.constexpr, BM: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program per piece. Without HAS_COUNTS each counts for itself, BLOCK pairs at once."""
    own = tl.program_id(0)
    expert = tl.arange(0, EXPERTS_PAD)
    total, before = counts_of(
        topk_ids, expert_map, counts, pairs, pieces, num_global, stride_it, stride_ik, stride_em, TOP_K, EXPERTS,
        EXPERTS_PAD, HAS_MAP, HAS_COUNTS, PIECE, BLOCK,
    )  # fmt: skip
    begin = tl.cumsum(total, 0) - total
    pair = own * PIECE + tl.arange(0, PIECE)
    mine = experts_of(
        topk_ids, expert_map, pair, pairs, num_global, stride_it, stride_ik, stride_em, TOP_K, EXPERTS, HAS_MAP
    )
    rank = ranks_in_piece(pair, mine)
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
