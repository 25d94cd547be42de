# mypy: ignore-errors
"""Combine: every rank stores its experts' sums in the slots of the tokens' ranks, which add them up.

    for each row of each other rank: if an expert of it is here, send the sum of its results over the experts here
    for each own row:                sum of rank 0 + ... + sum of rank W - 1, of those that own one of its experts

A sum over the experts of a rank is in the order of choices, in float32, rounded once to the dtype of y, also where it
is not sent. Sums of ranks are added in float32 in the order of ranks. So the result is the same in each run.

Sender and owner decide by the same ids whether a sum is sent. A rank may get no sum from another, so each call begins a
slot with a unit of 16 bytes that every rank sends to every rank: see `slots.py`.

A program sends and adds up one part of a row at a time, so that few rows are spread over the whole GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.shared.expert_rows import is_needed, sum_here, words_at
from kernelhub.backends.triton.comm.experts.words import slot_on
from kernelhub.backends.triton.comm.slots import bits_of, deadline, end, receive, slot_at, take


@triton.jit(do_not_specialize=["tokens", "begin", "rows", "most", "capacity", "ahead", "limit_us"])
def push_sums_kernel(
    y,
    places,
    weights,
    topk_ids,
    out,
    counters,
    missing,
    slots0,
    slots1,
    slots2,
    slots3,
    slots4,
    slots5,
    slots6,
    slots7,
    tokens,
    begin,
    rows,
    most,
    capacity,
    ahead,
    limit_us,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    LOCAL: tl.constexpr,
    SUMMED: tl.constexpr,
    BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    MOST: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """Rows `begin` to `begin + rows` of every rank, of which this one has `tokens`, and each at most `most`.

    y [N, H]; places and weights [WORLD * most, TOP_K], rows of y for each received token, -1 for none. If SUMMED, the
    experts have weighed and summed, and y has a row for each received token. topk_ids [tokens, TOP_K] are global;
    out [tokens, H]. Arguments of the group are as in `one_shot_kernel`.
    """
    slots = (slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7)
    parity = tl.load(counters + tl.program_id(0))
    until = deadline(limit_us, CLOCK)
    late = tl.zeros([], tl.int32)
    step = tl.num_programs(0)
    first = tl.program_id(0)
    lane = tl.arange(0, NARROW)
    choice = lane < TOP_K
    PARTS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    if parity >= 0:
        sender = capacity.to(tl.int64) * 16
        here = parity * (WORLD - 1) * sender
        if first == 0:
            for other in range(WORLD - 1):
                peer = tl.where(other < RANK, other, other + 1)
                greeting = words_at(slot_on(slots, peer, here, sender, RANK, WORLD))
                tl.store(greeting + lane, tl.zeros([NARROW], tl.int32), lane < 4)
        for sending in range(first, rows * PARTS + ahead * step, step):
            receiving = sending - ahead * step
            if sending < rows * PARTS:
                at = sending % PARTS * BLOCK + tl.arange(0, BLOCK)
                for other in range(WORLD - 1):
                    peer = tl.where(other < RANK, other, other + 1)
                    row = peer * most.to(tl.int64) + begin + sending // PARTS
                    named = tl.load(places + row * TOP_K + lane, choice, other=-1)
                    if tl.max(named, 0) >= 0:
                        slot = slot_at(slot_on(slots, peer, here, sender, RANK, WORLD) + 16, y)
                        total = sum_here(y, places, weights, row, at, H, TOP_K, SUMMED)
                        tl.store(slot + sending // PARTS * H + at, bits_of(total.to(y.dtype.element_ty)), at < H)
            own = (begin + receiving // PARTS).to(tl.int64)
            if (receiving >= 0) & (own < tokens):
                at = receiving % PARTS * BLOCK + tl.arange(0, BLOCK)
                ids = tl.load(topk_ids + own * TOP_K + lane, choice, other=-1)
                total = tl.zeros([BLOCK], tl.float32)
                for peer in range(WORLD):
                    if is_needed(ids, choice, peer * LOCAL, LOCAL):
                        if peer == RANK:
                            row = RANK * most.to(tl.int64) + own
                            value = sum_here(y, places, weights, row, at, H, TOP_K, SUMMED)
                            value = value.to(y.dtype.element_ty).to(tl.float32)
                        else:
                            other = tl.where(peer < RANK, peer, peer - 1)
                            slot = slot_at(slots[RANK] + here + other * sender + 16, y)
                            slot += receiving // PARTS * H + at
                            value, late = receive(slot, at < H, y.dtype.element_ty, missing, peer, until, late, CLOCK)
                        total += value
                tl.store(out + own * H + at, total.to(out.dtype.element_ty), at < H)
        if first == 0:
            for other in range(WORLD - 1):
                peer = tl.where(other < RANK, other, other + 1)
                greeting = words_at(slots[RANK] + here + other * sender)
                _, late = take(greeting + lane, lane < 4, missing, peer, until, late, CLOCK)
    else:
        for receiving in range(first, tl.minimum(rows, tokens - begin), step):
            for start in range(0, H, BLOCK):
                at = start + tl.arange(0, BLOCK)
                lost = tl.full([BLOCK], float("nan"), tl.float32)
                own = (begin + receiving).to(tl.int64)
                tl.store(out + own * H + at, lost.to(out.dtype.element_ty), at < H)
    end(counters, parity, late, MOST)
