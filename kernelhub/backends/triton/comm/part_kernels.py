# mypy: ignore-errors
"""Gather and reduce-scatter in one step, by the slots of `slots.py`: each rank stores what the others need.

    all_gather:      x to every rank; what comes from rank r is part r of the result
    reduce_scatter:  part r of x to rank r; each rank adds up the parts that come, in float32, in the order of ranks

A part is `part` units of 16 bytes. Programs send some tiles ahead of the tile that they wait for, as in `one_shot.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.comm.one_shot import add_up, send
from kernelhub.backends.triton.comm.slots import bits_of, deadline, end, place, slot_at, take


@triton.jit(do_not_specialize=["part", "capacity", "ahead", "limit_us"])
def all_gather_kernel(
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
    part,
    capacity,
    ahead,
    limit_us,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """x [part units], out [WORLD, part units]; arguments of the group are as in `one_shot_kernel`."""
    slots = (slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7)
    unit: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    n = part * unit
    parity = tl.load(counters + tl.program_id(0))
    until = deadline(limit_us, CLOCK)
    late = tl.zeros([], tl.int32)
    step = tl.num_programs(0) * BLOCK
    first = tl.program_id(0) * BLOCK
    lane = tl.arange(0, BLOCK)
    if parity >= 0:
        sender = capacity.to(tl.int64) * 16
        here = parity * (WORLD - 1) * sender
        for start in range(first, tl.minimum(first + ahead * step, n), step):
            send(x, start + lane, start + lane < n, slots, here, sender, RANK, WORLD)
        for start in range(first, n, step):
            later = start + ahead * step
            if later < n:
                send(x, later + lane, later + lane < n, slots, here, sender, RANK, WORLD)
            at = start + lane
            for peer in tl.static_range(WORLD):
                if peer == RANK:
                    value = tl.load(x + at, at < n)
                else:
                    slot = slot_at(slots[RANK] + here + place(peer, RANK) * sender, x) + at
                    bits, late = take(slot, at < n, missing, peer, until, late, CLOCK)
                    value = bits.to(x.dtype.element_ty, bitcast=True)
                tl.store(out + peer * n + at, value, at < n)
    else:
        for start in range(first, WORLD * n, step):
            lost = tl.full([BLOCK], float("nan"), out.dtype.element_ty)
            tl.store(out + start + lane, lost, start + lane < WORLD * n)
    end(counters, parity, late, MOST)


@triton.jit
def send_parts(x, at, mask, n, slots, here, sender, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Store elements of each other rank's part of x in the slots of this rank there."""
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            bits = bits_of(tl.load(x + peer * n + at, mask, other=0.0))
            tl.store(slot_at(slots[peer] + here + place(RANK, peer) * sender, x) + at, bits, mask)


@triton.jit(do_not_specialize=["part", "capacity", "ahead", "limit_us"])
def reduce_scatter_kernel(
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
    part,
    capacity,
    ahead,
    limit_us,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """x [WORLD, part units], out [part units]; arguments of the group are as in `one_shot_kernel`."""
    slots = (slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7)
    unit: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    n = part * unit
    parity = tl.load(counters + tl.program_id(0))
    until = deadline(limit_us, CLOCK)
    late = tl.zeros([], tl.int32)
    step = tl.num_programs(0) * BLOCK
    first = tl.program_id(0) * BLOCK
    lane = tl.arange(0, BLOCK)
    if parity >= 0:
        sender = capacity.to(tl.int64) * 16
        here = parity * (WORLD - 1) * sender
        for start in range(first, tl.minimum(first + ahead * step, n), step):
            send_parts(x, start + lane, start + lane < n, n, slots, here, sender, RANK, WORLD)
        for start in range(first, n, step):
            later = start + ahead * step
            if later < n:
                send_parts(x, later + lane, later + lane < n, n, slots, here, sender, RANK, WORLD)
            at, own = start + lane, x + RANK * n
            total, late = add_up(own, at, at < n, slots, here, sender, missing, until, late, RANK, WORLD, CLOCK)
            tl.store(out + at, total.to(out.dtype.element_ty), at < n)
    else:
        for start in range(first, n, step):
            tl.store(out + start + lane, tl.full([BLOCK], float("nan"), out.dtype.element_ty), start + lane < n)
    end(counters, parity, late, MOST)
