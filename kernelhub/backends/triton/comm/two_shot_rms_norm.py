# mypy: ignore-errors
"""All-reduce in two steps, addition of a residual and RMSNorm in one launch. A program works on whole rows.

    rows [r * part, (r + 1) * part) are added up by rank r
    for each row of a part that is a program's: send it, of every part, to the owner
    for each of them:  add up the own part's in the order of ranks, round it, send it to every rank; finish it
    for each of them:  finish the sums that the owners sent

    finish: sum += residual, in float32;  residual_out = sum;  out = sum / sqrt(mean(sum^2) + eps) * weight

The sum over ranks is rounded before the residual is added, on the owner, too, so that all ranks have equal bits. From
three ranks on less crosses the link than in one step, as in `two_shot.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.comm.one_shot import add_up
from kernelhub.backends.triton.comm.slots import bits_of, deadline, end, place, receive, slot_at


@triton.jit(do_not_specialize=["rows", "part", "capacity", "ahead", "limit_us"])
def two_shot_rms_norm_kernel(
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
        for index in range(first, tl.minimum(first + ahead * step, part), step):
            send_rows(x, index, rows, part, lane, slots, here, sender, H, RANK, WORLD)
        for index in range(first, part, step):
            later = index + ahead * step
            if later < part:
                send_rows(x, later, rows, part, lane, slots, here, sender, H, RANK, WORLD)
            row = RANK * part + index
            mask = inside & (row < rows)
            at = index * H + lane
            total, late = add_up(
                x + RANK * part * H, at, mask, slots, here, sender, missing, until, late, RANK, WORLD, CLOCK
            )
            rounded = total.to(x.dtype.element_ty)
            bits = bits_of(rounded)
            for peer in tl.static_range(WORLD):
                if peer != RANK:
                    tl.store(slot_at(slots[peer] + here + place(RANK, peer) * sender + sums, x) + at, bits, mask)
            before = tl.load(residual + row * H + lane, mask, other=0.0)
            finish(rounded, before, weight, out, residual_out, row, lane, mask, eps, H)
        for index in range(first, part, step):
            # Not unrolled: rows of several ranks at a time would take more registers than a thread has.
            for other in range(WORLD - 1):
                peer = other + (other + WORLD - RANK) // WORLD  # one more from this rank on
                row = peer * part + index
                mask = inside & (row < rows)
                slot = slot_at(slots[RANK] + here + other * sender + sums, x) + index * H + lane
                value, late = receive(slot, mask, x.dtype.element_ty, missing, peer, until, late, CLOCK)
                before = tl.load(residual + row * H + lane, mask, other=0.0)
                finish(value, before, weight, out, residual_out, row, lane, mask, eps, H)
    else:
        for row in range(first, rows, step):
            lost = tl.full([BLOCK], float("nan"), tl.float32)
            tl.store(residual_out + row * H + lane, lost.to(residual_out.dtype.element_ty), inside)
            tl.store(out + row * H + lane, lost.to(out.dtype.element_ty), inside)
    end(counters, parity, late, MOST)


@triton.jit
def send_rows(
    x, index, rows, part, lane, slots, here, sender, H: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr
):
    """Store the same row of each part in the slot of this rank on its owner."""
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            row = peer * part + index
            mask = (lane < H) & (row < rows)
            bits = bits_of(tl.load(x + row * H + lane, mask, other=0.0))
            tl.store(slot_at(slots[peer] + here + place(RANK, peer) * sender, x) + index * H + lane, bits, mask)


@triton.jit
def finish(value, before, weight, out, residual_out, row, lane, mask, eps, H: tl.constexpr):
    """Add what the residual had before to a row, and store it and its norm.

    The weight is loaded for each row: beside a row of 8192 it would not fit the registers.
    """
    at = row * H + lane
    total = tl.where(mask, value.to(tl.float32) + before.to(tl.float32), 0.0)
    inverse = tl.rsqrt(tl.sum(total * total, 0) / H + eps)
    # After the sum, in which all threads have read the row: residual_out may be x or the residual.
    tl.store(residual_out + at, total.to(residual_out.dtype.element_ty), mask)
    scale = tl.load(weight + lane, mask, other=0.0).to(tl.float32)
    tl.store(out + at, (total * inverse * scale).to(out.dtype.element_ty), mask)
