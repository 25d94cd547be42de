# mypy: ignore-errors
"""Every rank sends the number of its tokens to every rank."""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.shared.expert_rows import words_at
from kernelhub.backends.triton.comm.experts.words import slot_on
from kernelhub.backends.triton.comm.slots import deadline, end, take


@triton.jit(do_not_specialize=["tokens", "capacity", "ahead", "limit_us"])
def push_lengths_kernel(
    lengths,
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
    capacity,
    ahead,
    limit_us,
    NARROW: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    MOST: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """One program. lengths int32 [WORLD] gets `tokens` of each rank; those of ranks that do not come are undefined.

    Arguments of the group are as in `one_shot_kernel`.
    """
    slots = (slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7)
    parity = tl.load(counters)
    until = deadline(limit_us, CLOCK)
    late = tl.zeros([], tl.int32)
    lane = tl.arange(0, NARROW)
    unit = lane < 4
    if parity >= 0:
        sender = capacity.to(tl.int64) * 16
        here = parity * (WORLD - 1) * sender
        for other in range(WORLD - 1):
            peer = tl.where(other < RANK, other, other + 1)
            slot = words_at(slot_on(slots, peer, here, sender, RANK, WORLD))
            tl.store(slot + lane, tl.zeros([NARROW], tl.int32) + tokens, unit)
        tl.store(lengths + RANK, tokens)
        for other in range(WORLD - 1):
            peer = tl.where(other < RANK, other, other + 1)
            slot = words_at(slots[RANK] + here + other * sender)
            words, late = take(slot + lane, unit, missing, peer, until, late, CLOCK)
            tl.store(lengths + peer, tl.max(words, 0))
    end(counters, parity, late, MOST)
