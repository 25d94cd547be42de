# mypy: ignore-errors
"""Pairs of a token and a choice, sorted by expert on the device, each expert's padded to whole tiles.

    count the pairs of every expert; pad each to BLOCK_M; a running sum says where each begins
    one program per expert: go over all pairs, and write down those that are its own, in their order

No program waits for another and none adds to what another wrote, so the order is the same every time. A pair is a
number, token * TOP_K + rank; the number of pairs, which is no pair, pads a tile. The number of rows, which is not on
the host, is written to `num_rows`, and grids are sized for the maximum.
"""

from __future__ import annotations

import triton
import triton.language as tl


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


_VARYING = ["pairs", "num_global", "stride_it", "stride_ik", "stride_em"]
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
    HAS_MAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pairs of one expert."""
    own = tl.program_id(0)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, pairs, BLOCK):
        expert = experts_of(
            topk_ids, expert_map, start + tl.arange(0, BLOCK), pairs, num_global, stride_it, stride_ik, stride_em,
            TOP_K, EXPERTS, HAS_MAP,
        )  # fmt: skip
        total += (expert == own).to(tl.int32)
    tl.store(counts + own, tl.sum(total, 0))


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_METADATA)
def sort_kernel(
    topk_ids,
    expert_map,
    counts,
    sorted_pairs,
    tile_experts,
    num_rows,
    pairs,
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
    BLOCK: tl.constexpr,
):
    """The rows of one expert. Without counts every program counts for itself, which spares few pairs a launch."""
    own = tl.program_id(0)
    expert = tl.arange(0, EXPERTS_PAD)  # one more than there are, at least
    if HAS_COUNTS:
        count = tl.load(counts + expert, expert < EXPERTS, other=0)
    else:
        count = tl.zeros((EXPERTS_PAD,), dtype=tl.int32)
        for start in range(0, pairs, BLOCK):
            found = experts_of(
                topk_ids, expert_map, start + tl.arange(0, BLOCK), pairs, num_global, stride_it, stride_ik, stride_em,
                TOP_K, EXPERTS, HAS_MAP,
            )  # fmt: skip
            count += tl.histogram(found, EXPERTS_PAD)
        count = tl.where(expert < EXPERTS, count, 0)
    padded = (count + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    begin = tl.sum(tl.where(expert < own, padded, 0), 0)
    rows = tl.sum(tl.where(expert == own, count, 0), 0)
    if own == 0:
        tl.store(num_rows, tl.sum(padded, 0))
    if rows > 0:
        at = begin
        for start in range(0, pairs, BLOCK):
            pair = start + tl.arange(0, BLOCK)
            mine = (
                experts_of(
                    topk_ids, expert_map, pair, pairs, num_global, stride_it, stride_ik, stride_em,
                    TOP_K, EXPERTS, HAS_MAP,
                ) == own
            )  # fmt: skip
            place = tl.cumsum(mine.to(tl.int32), 0)
            tl.store(sorted_pairs + at + place - 1, pair, mine)
            at += tl.sum(mine.to(tl.int32), 0)
        end = begin + (rows + BLOCK_M - 1) // BLOCK_M * BLOCK_M
        rest = at + tl.arange(0, BLOCK_M)
        tl.store(sorted_pairs + rest, pairs + tl.zeros_like(rest), rest < end)
        for tile in range(begin // BLOCK_M, end // BLOCK_M):
            tl.store(tile_experts + tile, own)
