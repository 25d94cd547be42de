# mypy: ignore-errors
"""All-reduce, addition of a residual and RMSNorm in one launch and one step. A program works on whole rows.

    for each row of a program, some rows ahead: send the row of x to the slot of this rank on every other rank
    for each row of a program:  sum = x of rank 0 + ... + x of rank W - 1 + residual, in float32
                                residual_out = sum;  out = sum / sqrt(mean(sum^2) + eps) * weight

The residual and the weight are loaded before the wait for the other ranks. Where a program has one row, a NaN in the
sum of squares says that something has not come, so that the last look needs one reduction. What is normalised is the
sum in float32, not the one that was rounded into `residual_out`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.comm.at_once import add_up_with, send_values
from kernelhub.backends.triton.comm.one_shot import add_up, send
from kernelhub.backends.triton.comm.slots import deadline, end


@triton.jit(do_not_specialize=["rows", "capacity", "ahead", "limit_us"])
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
    capacity,
    ahead,
    limit_us,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    ONCE: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    MOST: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """x, residual, out, residual_out [rows, H]; the norm is times weight [H]. Slots as `one_shot_kernel`.

    If ONCE, a program has one row, and loads all before it reads which set of slots is used.
    """
    slots = (slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7)
    step = tl.num_programs(0)
    first = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    mask = lane < H
    if ONCE:
        own = tl.load(x + first * H + lane, mask, other=0.0)
        before = tl.load(residual + first * H + lane, mask, other=0.0).to(tl.float32)
        scale = tl.load(weight + lane, mask, other=0.0).to(tl.float32)
    parity = tl.load(counters + tl.program_id(0))
    until = deadline(limit_us, CLOCK)
    late = tl.zeros([], tl.int32)
    if parity >= 0:
        sender = capacity.to(tl.int64) * 16
        here = parity * (WORLD - 1) * sender
        if ONCE:
            at = first * H + lane
            send_values(own, x, at, mask, slots, here, sender, RANK, WORLD)
            total, squares, late = add_up_with(
                own.to(tl.float32), before, x, at, mask, slots, here, sender, missing, until, late, RANK, WORLD, CLOCK
            )
            inverse = tl.rsqrt(squares / H + eps)
            tl.store(residual_out + at, total.to(residual_out.dtype.element_ty), mask)
            tl.store(out + at, (total * inverse * scale).to(out.dtype.element_ty), mask)
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
