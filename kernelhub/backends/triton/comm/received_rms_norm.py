# mypy: ignore-errors
"""As `split_rms_norm.py`, for a result in the place of an operand: one more program of a row receives it.

    send this program's part of the row to the slot of this rank on every other rank
    the last program of a row:  sum = x of rank 0 + ... + x of rank W - 1 + residual, in float32, once all has come
                                residual_out = sum;  out = sum / sqrt(mean(sum^2) + eps) * weight

What is sent, and to which slots, is as there: a rank may have its result in place and another not. Here only one
program reads the residual and stores; where a result is in the place of x, it waits until the others of its row have
read their parts. They wait for nothing, and the hardware starts them before it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.comm.at_once import look_at_row, note_absent, send_values
from kernelhub.backends.triton.comm.fused_rms_norm import wait_for_readers
from kernelhub.backends.triton.comm.slots import deadline
from kernelhub.backends.triton.comm.turns import advance, empty_last


@triton.jit(do_not_specialize=["rows", "in_place", "capacity", "ahead", "limit_us"])
def received_rms_norm_kernel(
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
    SPLIT: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    MOST: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """x, residual, out, residual_out [rows, H]; the norm is times weight [H]. A grid has rows * (SPLIT + 1) programs.

    `slots` as `split_rms_norm_kernel`. in_place: 2 if out or residual_out may be x.
    """
    slots = (slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7)
    PART: tl.constexpr = BLOCK // SPLIT
    row = tl.program_id(0) // (SPLIT + 1)
    part = tl.program_id(0) % (SPLIT + 1)
    of_row = part * PART + tl.arange(0, PART)
    to_send = (of_row < H) & (part < SPLIT)
    sent = tl.load(x + row * H + of_row, to_send, other=0.0)
    state = tl.load(counters + tl.program_id(0))
    lane = tl.arange(0, BLOCK)
    inside = lane < H
    taken = inside & (part == SPLIT)
    at = row * H + lane
    live = state >= 0
    sender = capacity.to(tl.int64) * 16
    here = (state & 3) * (WORLD - 1) * sender
    send_values(sent, x, row * H + of_row, to_send & live, slots, here, sender, RANK, WORLD)
    until = deadline(limit_us, CLOCK)
    own = tl.load(x + at, taken, other=0.0).to(tl.float32)
    before = tl.load(residual + at, taken, other=0.0).to(tl.float32)
    scale = tl.load(weight + lane, taken, other=0.0)
    empty_last(x, slots, state, sender, PART, RANK, WORLD)
    used = (rows * (H * (x.dtype.element_ty.primitive_bitwidth // 8)) + 15) // 16
    following = tl.where(live, ((state & 3) + 1) % 3 + used * 4, -1)
    if part == SPLIT:
        if live & (in_place > 1):
            wait_for_readers(counters, tl.program_id(0), state, SPLIT + 1, PART)
        total = tl.full([BLOCK], float("nan"), tl.float32)
        squares = tl.zeros([], tl.float32)
        waits = tl.where(live, 2, 0)
        absent = tl.zeros([], tl.int32)  # a bit for each rank
        looks = tl.zeros([], tl.int64)
        while waits == 2:
            total, squares, waits, absent = look_at_row(
                looks, absent, own, before, x, at, inside, slots, here, sender, until, RANK, WORLD, CLOCK
            )
            looks += 1
        note_absent(absent, missing, WORLD)
        inverse = tl.rsqrt(squares / H + eps)
        tl.store(residual_out + at, total.to(residual_out.dtype.element_ty), inside)
        tl.store(out + at, (total * inverse * scale.to(tl.float32)).to(out.dtype.element_ty), inside)
        following = tl.where(waits > 0, -1, following)
    tl.debug_barrier()  # all threads have read the counter, and sent what they read
    advance(counters, following, MOST)
