# mypy: ignore-errors
"""All-reduce, addition of a residual and RMSNorm in one launch and one step: the programs of a row are a cluster.

    send this program's part of the row to the slot of this rank on the other rank
    load the part of the residual and of the weight, and empty what the call before has used
    each thread reads its elements of the other rank again until they have come
    sum = x of rank 0 + x of rank 1 + residual, of the part in float32
    exchange sums of squares in the cluster
    residual_out = sum;  out = sum / sqrt(mean(sum^2) + eps) * weight, of the part

`polled_rms_norm.py` reads all of x, the residual and the slots of a row in each of its programs: 43 KB of a row of
7168, of which a multiprocessor reads 64 bytes in a cycle. Here each reads its part, 2 KB of each, as programs of the
sum alone do; the price is one exchange in a cluster. Slots are those of `turns.py`, and counters are by row.

No program reads what another one stores, so a result may be in the place of any operand.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.comm.at_once import send_values
from kernelhub.backends.triton.comm.clusters import (
    await_part,
    await_programs,
    begin,
    root_of_row,
    share_squares,
)
from kernelhub.backends.triton.comm.early import after_last, have_come
from kernelhub.backends.triton.comm.slots import deadline, slot_at
from kernelhub.backends.triton.comm.turns import empty_last


@triton.jit(do_not_specialize=["rows", "in_place", "capacity", "ahead", "limit_us"])
def clustered_rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    residual_out,
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
    rows,
    eps,
    in_place,
    capacity,
    ahead,
    limit_us,
    H: tl.constexpr,
    PART: tl.constexpr,
    SPLIT: tl.constexpr,
    THREADS: tl.constexpr,
    EARLY: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    MOST: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """As `split_rms_norm_kernel`, of two ranks. A cluster has SPLIT programs of THREADS, a row and a part each of PART.

    EARLY: see `early.py`.
    """
    slots = (slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7)
    SIZE: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    row = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    if CLOCK:
        place, there, come = begin(SPLIT, THREADS)
    lane = tl.arange(0, PART)
    column = part * PART + lane
    inside = column < H
    at = row * H + column
    after_last(EARLY)
    own = tl.load(x + at, inside, other=0.0)
    state = tl.load(counters + row)
    live = state >= 0
    sender = capacity.to(tl.int64) * 16
    here = (state & 3) * (WORLD - 1) * sender
    send_values(own, x, at, inside & live, slots, here, sender, RANK, WORLD)
    until = deadline(limit_us, CLOCK)
    before = tl.load(residual + at, inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, inside, other=0.0)
    empty_last(x, slots, state, sender, PART, RANK, WORLD)
    used = (rows * (H * SIZE) + 15) // 16
    following = ((state & 3) + 1) % 3 + used * 4
    start = slots[RANK] + here + (row * H + part * PART).to(tl.int64) * SIZE
    if CLOCK:
        await_programs()
        bits = await_part(start, x, tl.where(live, (H - part * PART) * SIZE, 0), until, PART, THREADS)
    else:
        bits = await_all(slot_at(start, x) + lane, inside & live, until)
    other = bits.to(x.dtype.element_ty, bitcast=True).to(tl.float32)
    wide = own.to(tl.float32)
    if RANK == 0:
        total = wide + other
    else:
        total = other + wide
    total = tl.where(live, total + before, float("nan"))
    of_row = tl.where(inside, total, 0.0)
    if CLOCK:
        share_squares(of_row, bits, there, come, PART, THREADS)
        # Each thread has read what it stores now, while the sums are on their way.
        tl.store(residual_out + at, total.to(residual_out.dtype.element_ty), inside)
        inverse, late = root_of_row(place, eps, H, SPLIT, THREADS)
    else:
        tl.store(residual_out + at, total.to(residual_out.dtype.element_ty), inside)
        squares, late = of_cluster(tl.sum(of_row * of_row, 0), tl.max((bits == -1).to(tl.int32), 0), SPLIT)
        inverse = tl.rsqrt(squares / H + eps)
    have_come(EARLY)
    tl.store(out + at, (total * inverse * scale.to(tl.float32)).to(out.dtype.element_ty), inside)
    # All programs of the row have read the counter: they have taken part in the exchange.
    if part == 0:
        for first in tl.static_range(0, MOST, PART):
            counter = row + (first + lane) * rows
            tl.store(counters + counter, tl.where((late != 0) | (state < 0), -1, lane * 0 + following), counter < MOST)
    if late != 0:
        tl.store(missing + 1 - RANK, 1)


@triton.jit
def await_all(slot, mask, until):
    """As `await_part`, in the interpreter, which has no PTX and no clock."""
    bits = tl.load(slot, mask, other=0, volatile=True)
    polls = tl.zeros([], tl.int64)
    while (tl.max((bits == -1).to(tl.int32), 0) > 0) & (polls < until):
        bits = tl.load(slot, mask, other=0, volatile=True)
        polls += 1
    return bits


@triton.jit
def of_cluster(squares, lacks, SPLIT: tl.constexpr):
    """The sum over the programs of a row, and whether one lacks something, in the interpreter, which has no clusters.

    Tests of rows of several programs put another function in this place.
    """
    tl.static_assert(SPLIT == 1)
    return squares, lacks
