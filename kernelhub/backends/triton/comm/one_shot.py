# mypy: ignore-errors
"""All-reduce in one step: every rank sends all that it has to every rank, and each adds up what it has received.

    for each tile of a program, some tiles ahead: send the tile of x to the slot of this rank on every other rank
    for each tile of a program:                   sum = x of rank 0 + ... + x of rank W - 1 in float32; store it

All ranks add in the order of ranks, so all get equal bits. A message crosses the link once, W - 1 times per rank: the
lowest latency, and on two ranks the least traffic, too.

Every program sends tile i + `ahead` before it waits for tile i, and program p of a rank waits only for programs p of
the others, so programs need not all be resident: the hardware starts them in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.comm.at_once import add_up_at_once, send_values
from kernelhub.backends.triton.comm.early import after_last, have_come
from kernelhub.backends.triton.comm.slots import bits_of, deadline, end, place, receive, slot_at


@triton.jit
def send(x, at, mask, slots, here, sender, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Store elements of x in the slots of this rank on the other ranks.

    `here` is where the set begins, and `sender` how many bytes the slot of a sender has.
    """
    bits = bits_of(tl.load(x + at, mask, other=0.0))
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            tl.store(slot_at(slots[peer] + here + place(RANK, peer) * sender, x) + at, bits, mask)


@triton.jit
def add_up(
    x, at, mask, slots, here, sender, missing, until, late, RANK: tl.constexpr, WORLD: tl.constexpr, CLOCK: tl.constexpr
):
    """The sum of elements over all ranks in their order, in float32, and whether one is late. As `send`."""
    own = tl.load(x + at, mask, other=0.0).to(tl.float32)
    total = own
    for peer in tl.static_range(WORLD):
        if peer == RANK:
            value = own
        else:
            slot = slot_at(slots[RANK] + here + place(peer, RANK) * sender, x) + at
            value, late = receive(slot, mask, x.dtype.element_ty, missing, peer, until, late, CLOCK)
        total = value if peer == 0 else total + value
    return total, late


@triton.jit(do_not_specialize=["n", "capacity", "ahead", "limit_us"])
def one_shot_kernel(
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
    capacity,
    ahead,
    limit_us,
    ONCE: tl.constexpr,
    EARLY: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """`slots`r is the address on rank r of [2 sets, WORLD - 1 senders, `capacity` times 16 bytes].

    If ONCE, a program has one tile at most, and loads it before it reads which set is used. EARLY: see `early.py`.
    """
    slots = (slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7)
    unit: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    # Tiles cover whole units of 16 bytes, one for each thread, so that each is one load. The elements that remain are a
    # tile more, of one element for each thread: of warps that share one, one could empty its slot before another reads.
    whole = n // unit * unit
    step = tl.num_programs(0) * BLOCK
    first = tl.program_id(0) * BLOCK
    lane = tl.arange(0, BLOCK)
    rest = whole + tl.arange(0, BLOCK // unit)
    after_last(EARLY)
    if ONCE:
        own = tl.load(x + first + lane, first + lane < whole, other=0.0)
    parity = tl.load(counters + tl.program_id(0))
    until = deadline(limit_us, CLOCK)
    late = tl.zeros([], tl.int32)
    has_rest = (tl.program_id(0) == tl.num_programs(0) - 1) & (whole < n)
    if parity >= 0:
        sender = capacity.to(tl.int64) * 16
        here = parity * (WORLD - 1) * sender
        if has_rest:
            send(x, rest, rest < n, slots, here, sender, RANK, WORLD)
        if ONCE:
            at = first + lane
            send_values(own, x, at, at < whole, slots, here, sender, RANK, WORLD)
            wide = own.to(tl.float32)
            total, late = add_up_at_once(
                wide, x, at, at < whole, slots, here, sender, missing, until, late, RANK, WORLD, CLOCK
            )
            tl.store(out + at, total.to(out.dtype.element_ty), at < whole)
        else:
            for start in range(first, tl.minimum(first + ahead * step, whole), step):
                send(x, start + lane, start + lane < whole, slots, here, sender, RANK, WORLD)
            for start in range(first, whole, step):
                later = start + ahead * step
                if later < whole:
                    send(x, later + lane, later + lane < whole, slots, here, sender, RANK, WORLD)
                at = start + lane
                total, late = add_up(x, at, at < whole, slots, here, sender, missing, until, late, RANK, WORLD, CLOCK)
                tl.store(out + at, total.to(out.dtype.element_ty), at < whole)
        if has_rest:
            last, late = add_up(x, rest, rest < n, slots, here, sender, missing, until, late, RANK, WORLD, CLOCK)
            tl.store(out + rest, last.to(out.dtype.element_ty), rest < n)
    else:
        for start in range(first, n, step):
            tl.store(out + start + lane, tl.full([BLOCK], float("nan"), out.dtype.element_ty), start + lane < n)
    have_come(EARLY)
    end(counters, parity, late, MOST)
