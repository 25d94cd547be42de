# mypy: ignore-errors
"""Slots that several programs read: three sets in turn, each emptied by the call after the one that used it.

As `slots.py`, but nothing is emptied where it is read, since a program cannot see whether others have read it, too. A
counter holds the set that is used, 0 to 2, and how many units of 16 bytes of each slot the call before has used; or -1,
poisoned. Each call empties what the call before it has used, in the time that values take to come.

Why a sender may fill set s in call k: its own call k-1 has ended, in which it received from every rank, so every rank
had begun its call k-1, so every rank had ended its call k-2, which emptied what call k-3 had left in set s.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.comm.slots import slot_at


@triton.jit
def advance(counters, following, MOST: tl.constexpr):
    """Set the counters that this program keeps: its own and those of programs that this grid lacks."""
    lane = tl.arange(0, MOST)
    at = tl.program_id(0) + lane * tl.num_programs(0)
    tl.store(counters + at, tl.zeros([MOST], tl.int32) + following, at < MOST)


@triton.jit
def empty_last(x, slots, state, sender, PART: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Empty this program's share of what the call before has used; `sender` and `x` as of `one_shot.send`."""
    unit: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    count = tl.maximum(state >> 2, 0) * unit
    there = ((state & 3) + 2) % 3 * (WORLD - 1) * sender
    lane = tl.arange(0, PART)
    for start in range(tl.program_id(0) * PART, count, tl.num_programs(0) * PART):
        for place in tl.static_range(WORLD - 1):
            slot = slot_at(slots[RANK] + there + place * sender, x) + start + lane
            tl.store(slot, tl.full([PART], -1, slot.dtype.element_ty), start + lane < count)
