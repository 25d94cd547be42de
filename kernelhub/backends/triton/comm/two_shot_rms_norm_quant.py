# mypy: ignore-errors
"""All-reduce in two steps, addition of a residual, RMSNorm and quantisation in one launch.

    row r is added up by rank r % W
    for each row of a program, some rows ahead: send it to its owner
    for each row of a program: its owner adds it up in the order of ranks, rounds the sum, and sends it to every rank
                               other ranks wait for the sum
                               residual_out = sum + residual, rounded; its norm is quantised

As `two_shot_row_norm.py`, whose rounded sum over ranks this has, and as `fused_rms_norm_quant.py`: what is normalised
is the sum that was rounded into `residual_out`. Codes and scales are made on every rank, from equal bits, so that they
are equal, too. To send codes in place of sums would save little: every rank needs the sum for its residual.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.comm.at_once import add_up_at_once
from kernelhub.backends.triton.comm.one_shot import add_up
from kernelhub.backends.triton.comm.slots import bits_of, deadline, end, place, receive, slot_at
from kernelhub.backends.triton.comm.two_shot_row_norm import send_row
from kernelhub.backends.triton.fused_quant.rows import store_whole_row


@triton.jit(
    do_not_specialize=["rows", "eps", "stride_sr", "stride_sc", "part", "capacity", "ahead", "limit_us"],
    do_not_specialize_on_alignment=["scale_out", "given_scale"],
)
def two_shot_rms_norm_quant_kernel(
    x,
    residual,
    weight,
    given_scale,
    out,
    scale_out,
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
    stride_sr,
    stride_sc,
    part,
    capacity,
    ahead,
    limit_us,
    H: tl.constexpr,
    FORMAT: tl.constexpr,
    UE8M0: tl.constexpr,
    E8M0: tl.constexpr,
    LARGEST: tl.constexpr,
    FUSED: tl.constexpr,
    NATIVE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    MOST: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """As `all_reduce_rms_norm_quant_kernel`; a part is `part` rows, of which a slot holds twice as many. H fills units.

    AT_ONCE: an owner looks at the slots of all ranks at once.
    """
    slots = (slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7)
    WIDTH: tl.constexpr = H // 2 if FORMAT == "nvfp4" else H
    parity = tl.load(counters + tl.program_id(0))
    until = deadline(limit_us, CLOCK)
    late = tl.zeros([], tl.int32)
    step = tl.num_programs(0)
    first = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    inside = lane < H
    sender = capacity.to(tl.int64) * 16
    here = parity * (WORLD - 1) * sender
    sums = part.to(tl.int64) * (H * (x.dtype.element_ty.primitive_bitwidth // 8))
    if parity >= 0:
        for row in range(first, tl.minimum(first + ahead * step, rows), step):
            send_row(x, row, lane, inside, slots, here, sender, H, RANK, WORLD)
    given = 1.0
    if FORMAT == "fp8_tensor" or FORMAT == "nvfp4":
        given = tl.load(given_scale)
    for row in range(first, rows, step):
        total = tl.full([BLOCK], float("nan"), tl.float32)
        if parity >= 0:
            later = row + ahead * step
            if later < rows:
                send_row(x, later, lane, inside, slots, here, sender, H, RANK, WORLD)
            owner = row % WORLD
            at = row // WORLD * H + lane  # in a slot
            before = tl.load(residual + row * H + lane, inside, other=0.0).to(tl.float32)
            if owner == RANK:
                if AT_ONCE:
                    own = tl.load(x + row * H + lane, inside, other=0.0).to(tl.float32)
                    total, late = add_up_at_once(
                        own, x, at, inside, slots, here, sender, missing, until, late, RANK, WORLD, CLOCK
                    )
                else:
                    source = x + (row - row // WORLD) * H  # a row of x is elsewhere than in a slot
                    total, late = add_up(
                        source, at, inside, slots, here, sender, missing, until, late, RANK, WORLD, CLOCK
                    )
                rounded = total.to(x.dtype.element_ty)
                bits = bits_of(rounded)
                for peer in tl.static_range(WORLD):
                    if peer != RANK:
                        there = slots[peer] + here + place(RANK, peer) * sender + sums
                        tl.store(slot_at(there, x) + at, bits, inside)
                total = rounded.to(tl.float32)
            else:
                other = tl.where(owner > RANK, owner - 1, owner)
                slot = slot_at(slots[RANK] + here + other * sender + sums, x) + at
                total, late = receive(slot, inside, x.dtype.element_ty, missing, owner, until, late, CLOCK)
            total += before
        added = total.to(residual_out.dtype.element_ty)
        total = tl.where(inside, added.to(tl.float32), 0.0)
        inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(total * total, 0) / H + eps))
        # After the sum, in which all threads have read the row: residual_out may be x or the residual.
        tl.store(residual_out + row * H + lane, added, inside)
        # Loaded for each row: beside a row of 8192 the weight would not fit the registers.
        factor = tl.load(weight + lane, inside, other=0.0).to(tl.float32)
        scales = scale_out
        if FORMAT != "fp8_tensor":
            scales += stride_sr.to(tl.int64) * row
        store_whole_row(
            total * inverse * factor,
            out + row * WIDTH,
            scales,
            given,
            1,
            stride_sc,
            H,
            FORMAT,
            UE8M0,
            E8M0,
            LARGEST,
            BLOCK,
            FUSED,
            NATIVE,
        )
    end(counters, parity, late, MOST)
