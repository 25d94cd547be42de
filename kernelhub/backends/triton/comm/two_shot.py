# mypy: ignore-errors
"""All-reduce in two steps: each rank adds up one part of the message and sends the sum to every rank.

    part r of x is for rank r: [r * part, (r + 1) * part), cut off at n
    for each tile of a program: send its piece of every part to the owner
    for each tile:              add up the own part in the order of ranks, store it, send it to every rank
    for each tile:              store the sums that the owners sent

2 * (W - 1) / W of a message cross the link per rank, against W - 1 messages in one step: less from three ranks on, for
one latency of the link more. All ranks store the bits that the owner rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.comm.one_shot import add_up
from kernelhub.backends.triton.comm.slots import bits_of, deadline, end, place, receive, slot_at


@triton.jit(do_not_specialize=["n", "part16", "capacity", "ahead", "limit_us"])
def two_shot_kernel(
    x,
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
    n,
    part16,
    capacity,
    ahead,
    limit_us,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """As `one_shot_kernel`; n is whole units of 16 bytes, and a part `part16` of them, at most half a slot."""
    slots = (slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7)
    unit: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    parity = tl.load(counters + tl.program_id(0))
    until = deadline(limit_us, CLOCK)
    late = tl.zeros([], tl.int32)
    n = n // unit * unit
    part = part16 * unit
    step = tl.num_programs(0) * BLOCK
    first = tl.program_id(0) * BLOCK
    lane = tl.arange(0, BLOCK)
    if parity >= 0:
        sender = capacity.to(tl.int64) * 16
        here = parity * (WORLD - 1) * sender
        sums = part16.to(tl.int64) * 16  # where the slot of a sender holds what it has added up
        for start in range(first, tl.minimum(first + ahead * step, part), step):
            send_parts(x, start + lane, n, part, slots, here, sender, RANK, WORLD)
        for start in range(first, part, step):
            later = start + ahead * step
            if later < part:
                send_parts(x, later + lane, n, part, slots, here, sender, RANK, WORLD)
            at = start + lane
            mask = (at < part) & (at < n - RANK * part)
            total, late = add_up(
                x + RANK * part, at, mask, slots, here, sender, missing, until, late, RANK, WORLD, CLOCK
            )
            rounded = total.to(x.dtype.element_ty)
            tl.store(out + RANK * part + at, rounded, mask)
            bits = bits_of(rounded)
            for peer in tl.static_range(WORLD):
                if peer != RANK:
                    tl.store(slot_at(slots[peer] + here + place(RANK, peer) * sender + sums, x) + at, bits, mask)
        for start in range(first, part, step):
            at = start + lane
            for peer in tl.static_range(WORLD):
                if peer != RANK:
                    mask = (at < part) & (at < n - peer * part)
                    slot = slot_at(slots[RANK] + here + place(peer, RANK) * sender + sums, x) + at
                    value, late = receive(slot, mask, x.dtype.element_ty, missing, peer, until, late, CLOCK)
                    tl.store(out + peer * part + at, value.to(out.dtype.element_ty), mask)
    else:
        for start in range(first, n, step):
            tl.store(out + start + lane, tl.full([BLOCK], float("nan"), out.dtype.element_ty), start + lane < n)
    end(counters, parity, late, MOST)


@triton.jit
def send_parts(x, at, n, part, slots, here, sender, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Store the same place of each part in the slot of this rank on its owner."""
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            mask = (at < part) & (at < n - peer * part)
            bits = bits_of(tl.load(x + peer * part + at, mask, other=0.0))
            tl.store(slot_at(slots[peer] + here + place(RANK, peer) * sender, x) + at, bits, mask)
