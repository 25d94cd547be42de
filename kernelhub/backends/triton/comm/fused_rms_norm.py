# mypy: ignore-errors
"""All-reduce, addition of a residual and RMSNorm in one launch and one step. A program works on whole rows.

    for each row of a program, some rows ahead: send the row of x to the slot of this rank on every other rank
    for each row of a program:  sum = x of rank 0 + ... + x of rank W - 1 + residual, in float32
                                residual_out = sum;  out = sum / sqrt(mean(sum^2) + eps) * weight

The residual and the weight are loaded before the wait for the other ranks. Where a program has one row, a NaN in the
sum of squares says that something has not come, so that the last look needs one reduction. What is normalised is the
sum in float32, not the one that was rounded into `residual_out`.

Of few rows each has SPLIT programs: all send a part of it, since stores over the link take one multiprocessor long, and
the last receives the row. It waits for no later program of another rank, so here, too, the hardware may start programs
in order. Where a result is in the place of x, it also waits until the others of this rank have read their parts. Of few
rows `split_rms_norm.py` takes its place on the numbers of ranks on which it has run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.comm.at_once import add_up_with, send_values
from kernelhub.backends.triton.comm.one_shot import add_up, send
from kernelhub.backends.triton.comm.slots import deadline, end


@triton.jit(do_not_specialize=["rows", "in_place", "capacity", "ahead", "limit_us"])
def all_reduce_rms_norm_kernel(
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
    BLOCK: tl.constexpr,
    ONCE: tl.constexpr,
    SPLIT: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    MOST: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """x, residual, out, residual_out [rows, H]; the norm is times weight [H]. Slots as `one_shot_kernel`.

    If ONCE, a program has one row, or SPLIT programs have, and loads all before it reads which set of slots is used.
    in_place: whether out or residual_out may be x.
    """
    slots = (slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7)
    step = tl.num_programs(0)
    first = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    mask = lane < H
    if ONCE:
        at = first // SPLIT * H + lane
        taken = mask & (first % SPLIT == SPLIT - 1)
        own = tl.load(x + at, taken, other=0.0)
        if SPLIT > 1:
            of_row = first % SPLIT * (BLOCK // SPLIT) + tl.arange(0, BLOCK // SPLIT)
            sent_at = first // SPLIT * H + of_row
            sent = tl.load(x + sent_at, of_row < H, other=0.0)
        before = tl.load(residual + at, taken, other=0.0).to(tl.float32)
        scale = tl.load(weight + lane, taken, other=0.0)
    parity = tl.load(counters + tl.program_id(0))
    until = deadline(limit_us, CLOCK)
    late = tl.zeros([], tl.int32)
    if parity >= 0:
        sender = capacity.to(tl.int64) * 16
        here = parity * (WORLD - 1) * sender
        if ONCE:
            if SPLIT > 1:
                send_values(sent, x, sent_at, of_row < H, slots, here, sender, RANK, WORLD)
            else:
                send_values(own, x, at, mask, slots, here, sender, RANK, WORLD)
            if first % SPLIT == SPLIT - 1:
                if SPLIT > 1:  # noqa: SIM102  only this is known to the compiler
                    if in_place > 0:
                        late = wait_for_readers(counters, first, parity, SPLIT, BLOCK // SPLIT)
                wide = own.to(tl.float32)
                total, squares, late = add_up_with(
                    wide, before, x, at, mask, slots, here, sender, missing, until, late, RANK, WORLD, CLOCK
                )
                inverse = tl.rsqrt(squares / H + eps)
                tl.store(residual_out + at, total.to(residual_out.dtype.element_ty), mask)
                tl.store(out + at, (total * inverse * scale.to(tl.float32)).to(out.dtype.element_ty), mask)
        else:
            for row in range(first, tl.minimum(first + ahead * step, rows), step):
                send(x, row * H + lane, mask, slots, here, sender, RANK, WORLD)
            scale = tl.load(weight + lane, mask, other=0.0).to(tl.float32)
            for row in range(first, rows, step):
                later = row + ahead * step
                if later < rows:
                    send(x, later * H + lane, mask, slots, here, sender, RANK, WORLD)
                at = row * H + lane
                before = tl.load(residual + at, mask, other=0.0).to(tl.float32)
                total, late = add_up(x, at, mask, slots, here, sender, missing, until, late, RANK, WORLD, CLOCK)
                total += before
                inverse = tl.rsqrt(tl.sum(total * total, 0) / H + eps)
                # After the sum, in which all threads have read the row: residual_out may be x or the residual.
                tl.store(residual_out + at, total.to(residual_out.dtype.element_ty), mask)
                tl.store(out + at, (total * inverse * scale).to(out.dtype.element_ty), mask)
    else:
        for row in range(first, rows, step):
            lost = tl.full([BLOCK], float("nan"), tl.float32)
            tl.store(residual_out + row * H + lane, lost.to(residual_out.dtype.element_ty), mask)
            tl.store(out + row * H + lane, lost.to(out.dtype.element_ty), mask)
    end(counters, parity, late, MOST)


@triton.jit
def wait_for_readers(counters, first, parity, SPLIT: tl.constexpr, LANES: tl.constexpr):
    """0 once the other programs of a row have read it, and so advanced their counters: they wait for nothing.

    LANES: one for each thread at least, as in `slots.take`.
    """
    lane = tl.arange(0, LANES)
    others = lane < SPLIT - 1
    behind = tl.full([], 1, tl.int32)
    while behind > 0:
        counted = tl.load(counters + first - 1 - lane, others, other=-1, volatile=True)
        behind = tl.max((counted == parity).to(tl.int32), 0)
    return behind
