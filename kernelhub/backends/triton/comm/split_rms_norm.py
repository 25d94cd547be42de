# mypy: ignore-errors
"""All-reduce, addition of a residual and RMSNorm in one launch and one step, for few rows: several programs have a row.

    send this program's part of the row to the slot of this rank on every other rank
    load the whole row and the residual, and empty what the call before has used
    sum = x of rank 0 + ... + x of rank W - 1 + residual, of the whole row in float32, once all parts have come
    of this program's part: residual_out = sum;  out = sum / sqrt(mean(sum^2) + eps) * weight

One multiprocessor takes long to send a row, to store both results and to empty slots: each program does so for a part.
All read the whole row, so that none has to wait for what another adds up. A NaN in the sum of squares says that
something has not come, as in `at_once.add_up_with`; what is added and in which order is as in `fused_rms_norm.py`.

What is loaded while values are on their way costs nothing: nothing but the part itself is loaded before it is sent. A
program waits for the others of its row on other ranks, so that as many must be resident as a row has; the hardware
starts them in order. No result may be in the place of x or of the residual, which other programs read: such calls are
launched by `received_rms_norm.py`, over the same slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.comm.at_once import look_at_row, note_absent, send_values
from kernelhub.backends.triton.comm.early import after_last, have_come
from kernelhub.backends.triton.comm.slots import deadline
from kernelhub.backends.triton.comm.turns import advance, empty_last


@triton.jit(do_not_specialize=["rows", "in_place", "capacity", "ahead", "limit_us"])
def split_rms_norm_kernel(
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
    EARLY: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    MOST: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """x, residual, out, residual_out [rows, H]; the norm is times weight [H]. A grid has rows * SPLIT programs.

    `slots`r is the address on rank r of [3 sets, WORLD - 1 senders, `capacity` times 16 bytes]. in_place is 0. EARLY:
    see `early.py`.
    """
    slots = (slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7)
    PART: tl.constexpr = BLOCK // SPLIT
    row = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    of_row = part * PART + tl.arange(0, PART)
    after_last(EARLY)
    sent = tl.load(x + row * H + of_row, of_row < H, other=0.0)
    state = tl.load(counters + tl.program_id(0))
    lane = tl.arange(0, BLOCK)
    inside = lane < H
    mine = inside & (lane // PART == part)
    at = row * H + lane
    live = state >= 0  # no branch: the compiler would load what is sent after it
    sender = capacity.to(tl.int64) * 16
    here = (state & 3) * (WORLD - 1) * sender
    send_values(sent, x, row * H + of_row, (of_row < H) & live, slots, here, sender, RANK, WORLD)
    until = deadline(limit_us, CLOCK)
    own = tl.load(x + at, inside, other=0.0).to(tl.float32)
    before = tl.load(residual + at, inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + lane, mine, other=0.0)
    empty_last(x, slots, state, sender, PART, RANK, WORLD)
    used = (rows * (H * (x.dtype.element_ty.primitive_bitwidth // 8)) + 15) // 16
    following = ((state & 3) + 1) % 3 + used * 4
    total = tl.full([BLOCK], float("nan"), tl.float32)
    squares = tl.zeros([], tl.float32)
    waits = tl.where(live, 2, 0)
    absent = tl.zeros([], tl.int32)  # a bit for each rank
    looks = tl.zeros([], tl.int64)
    while waits == 2:
        total, squares, waits, absent = look_at_row(
            looks, absent, own, before, x, at, inside, slots, here, sender, until, RANK, WORLD, CLOCK
        )
        if looks == 0:
            # All threads have read the counter: they have taken part in the sum of squares.
            advance(counters, following, MOST)
        looks += 1
    have_come(EARLY)
    note_absent(absent, missing, WORLD)
    inverse = tl.rsqrt(squares / H + eps)
    tl.store(residual_out + at, total.to(residual_out.dtype.element_ty), mine)
    tl.store(out + at, (total * inverse * scale.to(tl.float32)).to(out.dtype.element_ty), mine)
    if waits > 0:
        advance(counters, -1, MOST)
