# mypy: ignore-errors
"""From received tokens to rows by expert, in two launches that do not wait for the host.

    places of an expert, one program each:  for each token in order: if it chose the expert, the next place is its own
    rows, one program for each token:       slot of a choice = begin of its expert + place; copy the row to each slot

So rows of an expert are in the order of tokens, whatever the order of programs. A token that chose an expert twice has
one place, at the first of these choices, with the sum of their weights in the order of choices.

Ids are read by all programs and never written. Weights and places of a choice belong to the program of its expert, and
a program handles a token by one thread, so that weights are replaced where they are. Slots replace places after all
threads of the token's program have read them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.shared.expert_rows import words_at


@triton.jit(do_not_specialize=["received"])
def places_kernel(
    ids,
    weights,
    places,
    counts,
    ends,
    received,
    TOP_K: tl.constexpr,
    LOCAL: tl.constexpr,
    ENDS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Program e: places of expert e among `received` tokens.

    ids [received, TOP_K] are local, others negative; weights and places are alike. Places are written where an id is
    local: -1 for a choice that repeats an earlier one. counts and ends [LOCAL]; ends, written if ENDS, hold 0 before.
    A block has a token for each thread at least; TOP_K is at most 32, the bits of a word.
    """
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    before = tl.zeros([], tl.int32)
    for start in range(0, received, BLOCK):
        row = start + lane
        at = row.to(tl.int64) * TOP_K
        chosen = tl.zeros([BLOCK], tl.uint32)
        for choice in tl.static_range(TOP_K):
            named = tl.load(ids + at + choice, row < received, other=-1) == expert
            chosen = tl.where(named, chosen | (1 << choice), chosen)
        once = (chosen != 0).to(tl.int32)
        place = before + tl.cumsum(once, 0) - once
        before += tl.sum(once, 0)
        total = tl.zeros([BLOCK], tl.float32)
        for choice in tl.static_range(TOP_K):
            total += tl.load(weights + at + choice, (chosen >> choice) & 1 > 0, other=0.0)
        tl.debug_barrier()  # weights have been read
        for choice in tl.static_range(TOP_K):
            named = (chosen >> choice) & 1 > 0
            first = chosen & ((1 << choice) - 1) == 0
            tl.store(places + at + choice, tl.where(first, place, -1), named)
            tl.store(weights + at + choice, tl.where(first, total, 0.0), named)
    tl.store(counts + expert, before)
    if ENDS:
        other = tl.arange(0, LANES)
        tl.atomic_add(ends + other, before, (other >= expert) & (other < LOCAL), sem="relaxed")


@triton.jit(do_not_specialize=["room"])
def rows_kernel(
    x,
    scales,
    ids,
    slots,
    counts,
    ends,
    made_x,
    made_scales,
    room,
    X_WORDS: tl.constexpr,
    SCALES: tl.constexpr,
    TOP_K: tl.constexpr,
    ENDS: tl.constexpr,
    BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Program t: slots of token t, and its row at each of them.

    Rows are X_WORDS words, and SCALES words of scales, which are not read if that is 0. slots [received, TOP_K] hold
    places, and get the rows of made_x: if ENDS, experts follow each other; else each has room for `room` rows.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, NARROW)
    choice = lane < TOP_K
    named = tl.load(ids + row * TOP_K + lane, choice, other=-1)
    place = tl.load(slots + row * TOP_K + lane, named >= 0, other=-1)
    if ENDS:
        begin = tl.load(ends + named, place >= 0, other=0) - tl.load(counts + named, place >= 0, other=0)
    else:
        begin = named * room
    tl.debug_barrier()  # places have been read
    tl.store(slots + row * TOP_K + lane, tl.where(place >= 0, begin + place, -1), choice)
    if tl.max(place, 0) >= 0:
        tl.debug_barrier()  # slots can be read
        write_rows(x, made_x, slots, row, X_WORDS, TOP_K, BLOCK)
        if SCALES > 0:
            write_rows(scales, made_scales, slots, row, SCALES, TOP_K, NARROW)


@triton.jit
def write_rows(source, target, slots, row, COUNT: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Copy the words of a token to each of its slots."""
    source, target = words_at(source), words_at(target)
    for start in range(0, COUNT, BLOCK):
        at = start + tl.arange(0, BLOCK)
        words = tl.load(source + row * COUNT + at, at < COUNT, other=0)
        for choice in range(TOP_K):
            slot = tl.load(slots + row * TOP_K + choice)
            if slot >= 0:
                tl.store(target + slot.to(tl.int64) * COUNT + at, words, at < COUNT)
