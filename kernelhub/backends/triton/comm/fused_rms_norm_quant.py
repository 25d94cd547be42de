# mypy: ignore-errors
"""All-reduce, addition of a residual, RMSNorm and quantisation in one launch and one step.

As `fused_rms_norm`, but what is normalised is the sum that was rounded into `residual_out`, and each row of the norm is
quantised as `kernelhub.backends.triton.fused_quant.rows` does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.comm.one_shot import add_up, send
from kernelhub.backends.triton.comm.slots import deadline, end
from kernelhub.backends.triton.fused_quant.rows import store_whole_row


@triton.jit(
    do_not_specialize=["rows", "eps", "stride_sr", "stride_sc", "capacity", "ahead", "limit_us"],
    do_not_specialize_on_alignment=["scale_out", "given_scale"],
)
def all_reduce_rms_norm_quant_kernel(
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
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    MOST: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """x, residual, residual_out [rows, H]; out [rows, H], of nvfp4 [rows, H / 2]; scale_out of the strides.

    Slots as `one_shot_kernel`. Rows that lack a rank are those of a sum of NaN.
    """
    slots = (slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7)
    WIDTH: tl.constexpr = H // 2 if FORMAT == "nvfp4" else H
    parity = tl.load(counters + tl.program_id(0))
    until = deadline(limit_us, CLOCK)
    late = tl.zeros([], tl.int32)
    step = tl.num_programs(0)
    first = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    mask = lane < H
    sender = capacity.to(tl.int64) * 16
    here = parity * (WORLD - 1) * sender
    if parity >= 0:
        for row in range(first, tl.minimum(first + ahead * step, rows), step):
            send(x, row * H + lane, mask, slots, here, sender, RANK, WORLD)
    factor = tl.load(weight + lane, mask, other=0.0).to(tl.float32)
    given = 1.0
    if FORMAT == "fp8_tensor" or FORMAT == "nvfp4":
        given = tl.load(given_scale)
    for row in range(first, rows, step):
        at = row * H + lane
        total = tl.full([BLOCK], float("nan"), tl.float32)
        if parity >= 0:
            later = row + ahead * step
            if later < rows:
                send(x, later * H + lane, mask, slots, here, sender, RANK, WORLD)
            before = tl.load(residual + at, mask, other=0.0).to(tl.float32)
            total, late = add_up(x, at, mask, slots, here, sender, missing, until, late, RANK, WORLD, CLOCK)
            total += before
        added = total.to(residual_out.dtype.element_ty)
        total = added.to(tl.float32)
        inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(total * total, 0) / H + eps))
        # After the sum, in which all threads have read the row: residual_out may be x or the residual.
        tl.store(residual_out + at, added, mask)
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
