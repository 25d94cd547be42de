# mypy: ignore-errors
"""As `split_rms_norm.py`, where each thread waits for its part of the row, and a program normalises its part only.

    send this program's part of the row to the slot of this rank on every other rank
    load the whole row and the residual, and empty what the call before has used
    each thread reads its elements of the other ranks again until they have come
    sum = x of rank 0 + ... + x of rank W - 1 + residual, of the whole row in float32
    of this program's part: residual_out = sum;  out = sum / sqrt(mean(sum^2) + eps) * weight

There a look at a row of 7168 takes one multiprocessor about 800 cycles, of which it waits 300 for memory: it adds up
and reduces what may lack something, and what comes in between waits for two looks. Then it multiplies and rounds the
whole row, and stores a fourth of it. Sums, bits, slots and counters are those of that kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.comm.at_once import look_at_row, note_absent, send_values
from kernelhub.backends.triton.comm.early import after_last, have_come
from kernelhub.backends.triton.comm.polled import look_patiently
from kernelhub.backends.triton.comm.slots import deadline
from kernelhub.backends.triton.comm.turns import advance, empty_last


@triton.jit(do_not_specialize=["rows", "in_place", "capacity", "ahead", "limit_us"])
def polled_rms_norm_kernel(
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
    THREADS: tl.constexpr,
    EARLY: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    MOST: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """As `split_rms_norm_kernel`. THREADS: of a program. H elements are whole units of 16 bytes."""
    slots = (slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7)
    PART: tl.constexpr = BLOCK // SPLIT
    SIZE: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    APART: tl.constexpr = PART * SIZE >= THREADS * 16  # each thread has units of each part
    row = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    of_row = part * PART + tl.arange(0, PART)
    of_part = row * H + of_row
    after_last(EARLY)
    sent = tl.load(x + of_part, of_row < H, other=0.0)
    state = tl.load(counters + tl.program_id(0))
    lane = tl.arange(0, BLOCK)
    inside = lane < H
    at = row * H + lane
    live = state >= 0  # no branch: the compiler would load what is sent after it
    sender = capacity.to(tl.int64) * 16
    here = (state & 3) * (WORLD - 1) * sender
    send_values(sent, x, of_part, (of_row < H) & live, slots, here, sender, RANK, WORLD)
    until = deadline(limit_us, CLOCK)
    own = tl.load(x + at, inside, other=0.0).to(tl.float32)
    before = tl.load(residual + at, inside, other=0.0).to(tl.float32)
    if APART:
        column, kept = of_row, of_row < H
    else:
        column, kept = lane, inside & (lane // PART == part)
    scale = tl.load(weight + column, kept, other=0.0)
    empty_last(x, slots, state, sender, PART, RANK, WORLD)
    used = (rows * (H * SIZE) + 15) // 16
    following = ((state & 3) + 1) % 3 + used * 4
    total = tl.full([BLOCK], float("nan"), tl.float32)
    squares = tl.zeros([], tl.float32)
    waits = tl.where(live, 2, 0)
    absent = tl.zeros([], tl.int32)  # a bit for each rank
    if live:
        total = look_patiently(own, x, at, row * H, inside, slots, here, sender, H, BLOCK, THREADS, RANK, WORLD, CLOCK)
        total += before
        squares = tl.sum(total * total, 0)
        waits = tl.where(squares == squares, 0, 2)
        # All threads have read the counter: they have taken part in the sum of squares.
        advance(counters, following, MOST)
    looks = tl.zeros([], tl.int64)
    while waits == 2:  # something lacks still, or the row has a NaN
        total, squares, waits, absent = look_at_row(
            looks, absent, own, before, x, at, inside, slots, here, sender, until, RANK, WORLD, CLOCK
        )
        looks += 1
    have_come(EARLY)
    note_absent(absent, missing, WORLD)
    inverse = tl.rsqrt(squares / H + eps)
    if APART:
        total = part_of(total, part, SPLIT, PART)
    tl.store(residual_out + row * H + column, total.to(residual_out.dtype.element_ty), kept)
    tl.store(out + row * H + column, (total * inverse * scale.to(tl.float32)).to(out.dtype.element_ty), kept)
    if waits > 0:
        advance(counters, -1, MOST)


@triton.jit
def part_of(row, part, SPLIT: tl.constexpr, PART: tl.constexpr):
    """One of the parts of a row. Bits are selected, so that -0 and NaN stay what they are."""
    bits = tl.reshape(row.to(tl.int32, bitcast=True), [SPLIT, PART])
    chosen = tl.where((tl.arange(0, SPLIT) == part)[:, None], bits, 0)
    return tl.sum(chosen, 0).to(tl.float32, bitcast=True)
