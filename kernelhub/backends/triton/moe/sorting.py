# mypy: ignore-errors
"""Pairs of a token and a choice, sorted by expert on the device, each expert's padded to whole tiles.

    count: for each piece of the pairs, how many each expert has in it
    sort: a pair's row = rows of experts before its own, its expert's pairs in pieces before, and in its piece before it

No program waits for another and none adds to what another wrote, so the order is the same every time. A pair is a
number, token * TOP_K + rank; the number of pairs, which is no pair, pads a tile. The number of rows, which is not on
the host, is written to `num_rows`, and grids are sized for the maximum.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ADDED = tl.constexpr(8192)  # counts of pieces that a program adds up at once


@triton.jit
def experts_of(
    topk_ids,
    expert_map,
    pair,
    pairs,
    num_global,
    stride_it,
    stride_ik,
    stride_em,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    HAS_MAP: tl.constexpr,
):
    """Local experts of pairs; EXPERTS for choices that are left out and for pairs that are none."""
    token = (pair // TOP_K).to(tl.int64)
    expert = tl.load(topk_ids + token * stride_it + pair % TOP_K * stride_ik, pair < pairs, other=-1)
    if HAS_MAP:
        known = (expert >= 0) & (expert < num_global)
        expert = tl.load(expert_map + expert * stride_em, known, other=-1)
    return tl.where((expert >= 0) & (expert < EXPERTS), expert, EXPERTS)


_VARYING = ["pairs", "pieces", "num_global", "stride_it", "stride_ik", "stride_em"]
# Results of the sort share one allocation, each beginning where the one before ends.
_METADATA = ["topk_ids", "expert_map", "counts", "sorted_pairs", "tile_experts", "num_rows"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_METADATA[:3])
def count_kernel(
    topk_ids,
    expert_map,
    counts,
    pairs,
    num_global,
    stride_it,
    stride_ik,
    stride_em,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    HAS_MAP: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Counts [pieces, EXPERTS_PAD]."""
    expert = experts_of(
        topk_ids, expert_map, tl.program_id(0) * PIECE + tl.arange(0, PIECE), pairs, num_global, stride_it, stride_ik,
        stride_em, TOP_K, EXPERTS, HAS_MAP,
    )  # fmt: skip
    found = tl.histogram(expert, EXPERTS_PAD, mask=expert < EXPERTS)
    tl.store(counts + tl.program_id(0) * EXPERTS_PAD + tl.arange(0, EXPERTS_PAD), found)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_METADATA)
def sort_kernel(
    topk_ids,
    expert_map,
    counts,
    sorted_pairs,
    tile_experts,
    num_rows,
    pairs,
    pieces,
    num_global,
    stride_it,
    stride_ik,
    stride_em,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program per piece. Without counts each counts for itself, BLOCK pairs at once, which spares few a launch."""
    own = tl.program_id(0)
    expert = tl.arange(0, EXPERTS_PAD)
    if HAS_COUNTS:
        ADDED: tl.constexpr = _ADDED // EXPERTS_PAD
        all_counts = tl.zeros((ADDED, EXPERTS_PAD), dtype=tl.int32)
        counts_before = tl.zeros((ADDED, EXPERTS_PAD), dtype=tl.int32)
        for start in range(0, pieces, ADDED):
            piece = start + tl.arange(0, ADDED)
            at = counts + piece[:, None] * EXPERTS_PAD + expert[None, :]
            found = tl.load(at, (piece < pieces)[:, None], other=0)
            all_counts += found
            counts_before += tl.where((piece < own)[:, None], found, 0)
        total = tl.sum(all_counts, 0)
        before = tl.sum(counts_before, 0)
    else:
        total = tl.zeros((EXPERTS_PAD,), dtype=tl.int32)
        before = tl.zeros((EXPERTS_PAD,), dtype=tl.int32)
        for start in range(0, pairs, BLOCK):
            chosen = experts_of(
                topk_ids, expert_map, start + tl.arange(0, BLOCK), pairs, num_global, stride_it, stride_ik, stride_em,
                TOP_K, EXPERTS, HAS_MAP,
            )  # fmt: skip
            found = tl.histogram(chosen, EXPERTS_PAD, mask=chosen < EXPERTS)
            total += found
            before += tl.where(start + BLOCK <= own * PIECE, found, 0)
        if own * PIECE % BLOCK > 0:
            earlier = own * PIECE // BLOCK * BLOCK + tl.arange(0, BLOCK)
            chosen = experts_of(
                topk_ids, expert_map, earlier, pairs, num_global, stride_it, stride_ik, stride_em, TOP_K, EXPERTS,
                HAS_MAP,
            )  # fmt: skip
            before += tl.histogram(chosen, EXPERTS_PAD, mask=(chosen < EXPERTS) & (earlier < own * PIECE))
    tiles = (total + BLOCK_M - 1) // BLOCK_M
    tile = tl.cumsum(tiles, 0) - tiles
    pair = own * PIECE + tl.arange(0, PIECE)
    mine = experts_of(
        topk_ids, expert_map, pair, pairs, num_global, stride_it, stride_ik, stride_em, TOP_K, EXPERTS, HAS_MAP
    )
    same = (mine[:, None] == mine[None, :]) & (pair[:, None] < pair[None, :])
    rank = tl.sum(same.to(tl.int32), 0)
    row = tl.gather(tile * BLOCK_M + before, tl.minimum(mine, EXPERTS_PAD - 1), 0) + rank
    tl.store(sorted_pairs + row, pair, mine < EXPERTS)
    # What is left of tiles and of the list of tiles is shared out among programs.
    end = tile * BLOCK_M + total
    for rest in range(own, BLOCK_M, pieces):
        tl.store(sorted_pairs + end + rest, pairs + tl.zeros_like(end), rest < tiles * BLOCK_M - total)
    for further in range(own, tl.max(tiles, 0), pieces):
        tl.store(tile_experts + tile + further, expert, further < tiles)
    if own == 0:
        tl.store(num_rows, tl.sum(tiles, 0) * BLOCK_M)
