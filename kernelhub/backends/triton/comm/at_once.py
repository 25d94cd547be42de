# mypy: ignore-errors
"""Sums in which a program has one tile or row: one wait for all ranks.

A look at a slot takes the way to memory, and a wait for what it shows a reduction over the program. So a program looks
at the slots of all ranks at once, and asks once whether something is missing. It loads its own values before it
reads which set of slots is used.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from kernelhub.backends.triton.comm.slots import bits_of, place, slot_at

# Elements of all slots that a program looks at in one go. More do not fit its registers: rows of 8192 of 8 ranks
# spilled 480 bytes of a thread on sm_90.
MOST = 16384
_PATIENCE = tl.constexpr(8)  # of so many looks at a row that has a NaN one asks whether it is of an empty slot


@triton.jit
def send_values(values, x, at, mask, slots, here, sender, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Store values in the slots of this rank on the other ranks, as `one_shot.send`; of x only the dtype matters."""
    bits = bits_of(values)
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            tl.store(slot_at(slots[peer] + here + place(RANK, peer) * sender, x) + at, bits, mask)


@triton.jit
def add_up_at_once(
    own,
    x,
    at,
    mask,
    slots,
    here,
    sender,
    missing,
    until,
    late,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """The sum over all ranks in their order, as `one_shot.add_up`; this rank's values and the sum are float32."""
    total, empty = look(own, x, at, mask, slots, here, sender, RANK, WORLD)
    state = tl.max(tl.where(empty != 0, 2, 0), 0)
    polls = tl.zeros([], tl.int64)
    while state == 2:
        if CLOCK:
            over = globaltimer() > until
        else:
            polls += 1
            over = polls > until
        total, empty = look(own, x, at, mask, slots, here, sender, RANK, WORLD)
        # Threads read the clock at different times. They leave the loop together: once one that has an empty element
        # is late, 3, or none has, 0.
        state = tl.max(tl.where(empty != 0, 2 + over.to(tl.int32), 0), 0)
    if state > 0:
        note_missing(empty, missing, RANK, WORLD)
    empty_slots(x, at, mask, slots, here, sender, RANK, WORLD)
    return total, tl.maximum(late, state)


@triton.jit
def add_up_with(
    own,
    before,
    x,
    at,
    mask,
    slots,
    here,
    sender,
    missing,
    until,
    late,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """A row's sum over all ranks and the residual, the sum of its squares, and whether a rank is late.

    An empty element is a NaN, and so is the sum of squares then. So that sum, which the norm needs, also says that the
    row has come: one reduction over the program after the last look, where asking for empty elements takes another. Nor
    do the usual looks compare elements: one program has a whole row, whose instructions take part of its time.
    """
    total = own
    squares = tl.zeros([], tl.float32)
    state = tl.full([], 2, tl.int32)
    absent = tl.zeros([], tl.int32)  # a bit for each rank
    looks = tl.zeros([], tl.int64)
    while state == 2:
        total, squares, state, absent = look_at_row(
            looks, absent, own, before, x, at, mask, slots, here, sender, until, RANK, WORLD, CLOCK
        )
        looks += 1
    note_absent(absent, missing, WORLD)
    empty_slots(x, at, mask, slots, here, sender, RANK, WORLD)
    return total, squares, tl.maximum(late, state)


@triton.jit
def look_at_row(
    looks,
    absent,
    own,
    before,
    x,
    at,
    mask,
    slots,
    here,
    sender,
    until,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """One look of a program that waits for a row: the sum, that of its squares, a state, and a bit for each late rank.

    The state is 2 while something has not come and there is time, 3 when there is none, 0 once all has come. `absent`
    has the bits of the looks before.
    """
    if looks % _PATIENCE < _PATIENCE - 1:
        total = look_only(own, x, at, mask, slots, here, sender, RANK, WORLD) + before
        squares = tl.sum(total * total, 0)
        state = tl.where(squares == squares, 0, 2)
    else:  # the row itself may have a NaN
        if CLOCK:
            over = globaltimer() > until
        else:
            over = looks > until
        total, empty = look(own, x, at, mask, slots, here, sender, RANK, WORLD)
        total += before
        squares = tl.sum(total * total, 0)
        state = tl.max(tl.where(empty != 0, 2 + over.to(tl.int32), 0), 0)
        if state == 3:
            for peer in tl.static_range(WORLD):
                absent += tl.max(empty & (1 << peer), 0)
    return total, squares, state, absent


@triton.jit
def note_absent(absent, missing, WORLD: tl.constexpr):
    """Mark the ranks of `look_at_row`'s bits."""
    for peer in tl.static_range(WORLD):
        tl.store(missing + peer, 1, (absent & (1 << peer)) > 0)


@triton.jit
def look_only(own, x, at, mask, slots, here, sender, RANK: tl.constexpr, WORLD: tl.constexpr):
    """The sum as far as elements have come: NaN where one has not."""
    words = ()
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            slot = slot_at(slots[RANK] + here + place(peer, RANK) * sender, x) + at
            words = words + (tl.load(slot, mask, other=0, volatile=True),)  # noqa: RUF005  Triton unpacks none
    total = own
    for peer in tl.static_range(WORLD):
        value = own if peer == RANK else words[place(peer, RANK)].to(x.dtype.element_ty, bitcast=True).to(tl.float32)
        total = value if peer == 0 else total + value
    return total


@triton.jit
def look(own, x, at, mask, slots, here, sender, RANK: tl.constexpr, WORLD: tl.constexpr):
    """The sum as far as elements have come, and a bit for each rank whose element has not: empty ones are NaN."""
    words = ()
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            slot = slot_at(slots[RANK] + here + place(peer, RANK) * sender, x) + at
            words = words + (tl.load(slot, mask, other=0, volatile=True),)  # noqa: RUF005  Triton unpacks none
    total = own
    empty = tl.zeros(at.shape, tl.int32)
    for peer in tl.static_range(WORLD):
        if peer == RANK:
            value = own
        else:
            bits = words[place(peer, RANK)]
            empty = empty | tl.where(bits == -1, 1 << peer, 0)
            value = bits.to(x.dtype.element_ty, bitcast=True).to(tl.float32)
        total = value if peer == 0 else total + value
    return total, empty


@triton.jit
def note_missing(empty, missing, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Mark the ranks that had not come at the last look."""
    if WORLD == 2:
        tl.store(missing + 1 - RANK, 1)
    else:
        for peer in tl.static_range(WORLD):
            if peer != RANK:
                late = tl.max(empty & (1 << peer), 0) > 0
                tl.store(missing + peer, 1, late)


@triton.jit
def empty_slots(x, at, mask, slots, here, sender, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Make elements empty again that were taken, in the slots of all other ranks."""
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            slot = slot_at(slots[RANK] + here + place(peer, RANK) * sender, x) + at
            tl.store(slot, tl.full(at.shape, -1, slot.dtype.element_ty), mask)
