# mypy: ignore-errors
"""Device code that counts pairs of a token and a choice by expert, in pieces, for sorts by expert.

    count: for each piece of the pairs, how many each expert has in it
    then a pair follows those of its expert in pieces before its own, and those in its piece before it

A pair is a number, token * TOP_K + rank. No program waits for another and none adds to what another wrote, so the order
is the same every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ADDED = tl.constexpr(8192)  # counts of pieces that a program adds up at once


@triton.jit
def experts_of(
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


@triton.jit(
    do_not_specialize=["pairs", "num_global", "stride_it", "stride_ik", "stride_em"],
    do_not_specialize_on_alignment=["topk_ids", "expert_map", "counts"],
)
def count_kernel(
    topk_ids, expert_map, counts, pairs, num_global, stride_it, stride_ik, stride_em, TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, HAS_MAP: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Counts [pieces, EXPERTS_PAD]."""
    pair = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    expert = experts_of(
        topk_ids, expert_map, pair, pairs, num_global, stride_it, stride_ik, stride_em, TOP_K, EXPERTS, HAS_MAP
    )
    found = tl.histogram(expert, EXPERTS_PAD, mask=expert < EXPERTS)
    tl.store(counts + tl.program_id(0) * EXPERTS_PAD + tl.arange(0, EXPERTS_PAD), found)


@triton.jit
def counts_of(
    topk_ids, expert_map, counts, pairs, pieces, num_global, stride_it, stride_ik, stride_em, TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, HAS_MAP: tl.constexpr, HAS_COUNTS: tl.constexpr,
    PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pairs of each expert: all, and those in pieces before the program's own. Without HAS_COUNTS it counts for itself,
    BLOCK pairs at once, which spares few pairs a launch.
    """
    own = tl.program_id(0)
    if HAS_COUNTS:
        expert = tl.arange(0, EXPERTS_PAD)
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
    return total, before


@triton.jit
def ranks_in_piece(pair, mine):
    """How many earlier pairs of a piece have the same expert, of `mine`."""
    same = (mine[:, None] == mine[None, :]) & (pair[:, None] < pair[None, :])
    return tl.sum(same.to(tl.int32), 0)
