# mypy: ignore-errors
"""Passing values between ranks through slots in memory that all ranks map, without flags and without fences.

An empty slot holds the bits EMPTY in every element, a NaN that senders replace by another NaN. A sender stores values
where the receiver reads them; the receiver reads until no element is empty, so each element says by itself that it has
come, in whatever order and parts the link delivers the stores. The receiver then empties the slot again.

Two sets of slots alternate. Each rank keeps the number of the set in counters in its own memory, one for each program
that a grid can have; every call advances all of them, so they are equal when a kernel begins, whatever the grids were.
So a graph replays correctly, and in any mix with eager calls, as long as calls of one group follow each other on one
stream (`backends.shared.slot_memory` sees to that).

Why a sender may fill set s in call k: its own call k-1 has ended, in which it received from every rank, so every rank
had begun its call k-1, so every rank had ended its call k-2, the last before that read set s and emptied it.

Waiting is bounded: at `until`, or in the interpreter, which has no clock, after that many polls, a program marks the
rank it waits for in `missing`, which the host reads, and sets its counters to -1, poisoned. Programs of later calls
that find that neither send nor wait. Results that lack a rank hold NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def deadline(limit_us, CLOCK: tl.constexpr):
    """When waiting ends, in ns; without a clock, after how many polls."""
    limit = limit_us.to(tl.int64)
    if CLOCK:
        limit = globaltimer() + limit * 1000
    return limit


@triton.jit
def end(counters, parity, late, MOST: tl.constexpr):
    """Advance the counters that this program keeps: its own and those of programs that this grid lacks."""
    tl.debug_barrier()  # all threads have read the counter
    lane = tl.arange(0, MOST)
    at = tl.program_id(0) + lane * tl.num_programs(0)
    following = tl.where((late > 0) | (parity < 0), -1, 1 - parity)
    tl.store(counters + at, tl.zeros([MOST], tl.int32) + following, at < MOST)


@triton.jit
def bits_of(value):
    """The bits of values to send: none of them EMPTY."""
    if value.dtype.primitive_bitwidth == 32:
        bits = value.to(tl.int32, bitcast=True)
        sent = tl.where(bits == -1, 0x7FFFFFFF, bits)
    else:
        bits = value.to(tl.int16, bitcast=True)
        sent = tl.where(bits == -1, 0x7FFF, bits).to(tl.int16)
    return sent


@triton.jit
def slot_at(address, like):
    """A pointer to bits from an address in memory of some rank."""
    if like.dtype.element_ty.primitive_bitwidth == 32:
        slot = address.to(tl.pointer_type(tl.int32))
    else:
        slot = address.to(tl.pointer_type(tl.int16))
    return tl.multiple_of(slot, 16)


@triton.constexpr_function
def place(sender, receiver):
    """Which slot of a receiver is a sender's: it has none for itself."""
    return sender if sender < receiver else sender - 1


@triton.jit
def take(slot, mask, missing, peer, until, late, CLOCK: tl.constexpr):
    """Bits of one rank once all have come, and whether the time was over before. Empties the slot.

    A block has an element for each thread at least: warps that share elements would not wait for each other.
    """
    bits = tl.load(slot, mask, other=0, volatile=True)
    state = tl.max(tl.where(bits == -1, 2, 0), 0)
    polls = tl.zeros([], tl.int64)
    while state == 2:
        if CLOCK:
            over = globaltimer() > until
        else:
            polls += 1
            over = polls > until
        bits = tl.load(slot, mask, other=0, volatile=True)
        # Threads read the clock at different times. They leave the loop together: once one that has an empty element
        # is late, 3, or none has, 0.
        state = tl.max(tl.where(bits == -1, 2 + over.to(tl.int32), 0), 0)
    if state > 0:
        tl.store(missing + peer, 1)
    tl.store(slot, tl.full(bits.shape, -1, bits.dtype), mask)
    return bits, tl.maximum(late, state)


@triton.jit
def receive(slot, mask, dtype: tl.constexpr, missing, peer, until, late, CLOCK: tl.constexpr):
    """As `take`, values as float32."""
    bits, late = take(slot, mask, missing, peer, until, late, CLOCK)
    return bits.to(dtype, bitcast=True).to(tl.float32), late
