# mypy: ignore-errors
"""All-reduce in two steps, addition of a residual and RMSNorm in one launch, for few rows: each has a program.

    row r is added up by rank r % W
    for each row of a program, some rows ahead: send it to its owner
    for each row of a program: its owner adds it up in the order of ranks, rounds the sum, and sends it to every rank
                               other ranks wait for the sum
                               finish: sum += residual, in float32;  residual_out = sum;
                                       out = sum / sqrt(mean(sum^2) + eps) * weight

The sum over ranks is rounded before the residual is added, on the owner, too, so that all ranks have equal bits. From
three ranks on less crosses the link than in one step, as in `two_shot.py`. Program p waits only for programs p of the
other ranks, since each row is of the same program everywhere. `two_shot_rms_norm.py` has a program for W rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.comm.at_once import add_up_at_once
from kernelhub.backends.triton.comm.experts.words import slot_on
from kernelhub.backends.triton.comm.slots import bits_of, deadline, end, place, receive, slot_at
from kernelhub.backends.triton.comm.two_shot_rms_norm import finish


@triton.jit(do_not_specialize=["rows", "part", "capacity", "ahead", "limit_us"])
def two_shot_row_norm_kernel(
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
    part,
    capacity,
    ahead,
    limit_us,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    MOST: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """As `all_reduce_rms_norm_kernel`; a part is `part` rows, of which a slot holds twice as many. H fills units."""
    slots = (slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7)
    parity = tl.load(counters + tl.program_id(0))
    until = deadline(limit_us, CLOCK)
    late = tl.zeros([], tl.int32)
    step = tl.num_programs(0)
    first = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    inside = lane < H
    if parity >= 0:
        sender = capacity.to(tl.int64) * 16
        here = parity * (WORLD - 1) * sender
        sums = part.to(tl.int64) * (H * (x.dtype.element_ty.primitive_bitwidth // 8))
        for row in range(first, tl.minimum(first + ahead * step, rows), step):
            send_row(x, row, lane, inside, slots, here, sender, H, RANK, WORLD)
        for row in range(first, rows, step):
            later = row + ahead * step
            if later < rows:
                send_row(x, later, lane, inside, slots, here, sender, H, RANK, WORLD)
            owner = row % WORLD
            at = row // WORLD * H + lane  # in a slot
            before = tl.load(residual + row * H + lane, inside, other=0.0)
            if owner == RANK:
                own = tl.load(x + row * H + lane, inside, other=0.0).to(tl.float32)
                total, late = add_up_at_once(
                    own, x, at, inside, slots, here, sender, missing, until, late, RANK, WORLD, CLOCK
                )
                total = total.to(x.dtype.element_ty).to(tl.float32)
                bits = bits_of(total.to(x.dtype.element_ty))
                for peer in tl.static_range(WORLD):
                    if peer != RANK:
                        there = slots[peer] + here + place(RANK, peer) * sender + sums
                        tl.store(slot_at(there, x) + at, bits, inside)
            else:
                other = tl.where(owner > RANK, owner - 1, owner)
                slot = slot_at(slots[RANK] + here + other * sender + sums, x) + at
                total, late = receive(slot, inside, x.dtype.element_ty, missing, owner, until, late, CLOCK)
            finish(total, before, weight, out, residual_out, row, lane, inside, eps, H)
    else:
        for row in range(first, rows, step):
            lost = tl.full([BLOCK], float("nan"), tl.float32)
            tl.store(residual_out + row * H + lane, lost.to(residual_out.dtype.element_ty), inside)
            tl.store(out + row * H + lane, lost.to(out.dtype.element_ty), inside)
    end(counters, parity, late, MOST)


@triton.jit
def send_row(x, row, lane, inside, slots, here, sender, H: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Store a row in the slot of this rank on its owner, if that is another rank."""
    owner = row % WORLD
    if owner != RANK:
        bits = bits_of(tl.load(x + row * H + lane, inside, other=0.0))
        slot = slot_at(slot_on(slots, owner, here, sender, RANK, WORLD), x)
        tl.store(slot + row // WORLD * H + lane, bits, inside)
