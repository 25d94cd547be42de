# mypy: ignore-errors
"""What multiplying warpgroups do for one tile of a float8 product: sums over K, and what comes after them.

The tensor cores add in 14 bits, so what 128 columns give is moved to float32 (DeepSeek-V3, section 3.3). While one
warpgroup does that the other multiplies. Each holds WAVES x 64 rows; the product of the second 64 reuses the registers
of the first. Scales are read one step ahead, from any strides, straight into registers.

Three things keep ptxas from spilling and from waiting early (each was a slower version): `warpgroup_mma_wait` on sums
while nothing is in flight, `use_acc=False` with the last product as the accumulator, and int32 offsets of rows.
"""

from __future__ import annotations

from kernelhub.backends.gluon.language import gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
from kernelhub.backends.gluon.scales import LEFT_OF_BOTH, halves_of, number, of_both


@gluon.jit
def scaled_sums(
    a_bufs, b_bufs, full, empty, turn, step, blocks, a_scale, row, end, stride_am_scale, stride_ak_scale, b_scale,
    stride_bk_scale, WHICH: gl.constexpr, BN: gl.constexpr, WAVES: gl.constexpr, STAGES: gl.constexpr,
    BLOCKS: gl.constexpr, A_E8M0: gl.constexpr, B_E8M0: gl.constexpr, TURNS: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Sums of the WHICH-th WAVES x 64 rows of a stage; the rows of `a_scale` are those from `row` on, before `end`.

    `b_scale` points at the scale of the tile's columns and the first block of K. Without BLOCKS nothing is scaled.
    With TURNS the two warpgroups issue their products one after the other, two each in a step: else the tensor cores
    work at both at once, and then both scale sums at once. 4096 rows with 7168 x 18432 took 0.89 ms so on an H100, and
    0.96 without.
    """
    FIRST: gl.constexpr = WHICH * WAVES * 64
    sums0 = gl.zeros((64, BN), gl.float32, layout)
    sums1 = gl.zeros((64, BN), gl.float32, layout)
    zero = gl.zeros((64, BN), gl.float32, layout)
    if BLOCKS:
        within = gl.arange(0, 64, gl.SliceLayout(1, layout))
        at0 = gl.minimum(row + within, end - 1) * stride_am_scale
        at1 = gl.minimum(row + 64 + within, end - 1) * stride_am_scale
        nb = number(gl.load(b_scale), B_E8M0)
        n0 = gl.load(a_scale + at0)
        n1 = n0
        if WAVES == 2:
            n1 = gl.load(a_scale + at1)
    for kb in range(blocks):
        s = step % STAGES
        mbarrier.wait(full.index(s), (step // STAGES) & 1)
        b = b_bufs.index(s).permute((1, 0))
        a = a_bufs.index(s)
        if TURNS:
            mbarrier.wait(turn.index(WHICH), 1 - WHICH)
        p0 = warpgroup_mma(a.slice(FIRST, 64), b, zero, use_acc=False, is_async=True)
        if TURNS:
            mbarrier.arrive(turn.index(1 - WHICH), count=1)
        if BLOCKS:
            f0 = of_both(number(n0, A_E8M0), nb)
            f1 = f0
            if WAVES == 2:
                f1 = of_both(number(n1, A_E8M0), nb)
            ahead = gl.minimum(kb + 1, blocks - 1)
            nb = number(gl.load(b_scale + ahead * stride_bk_scale), B_E8M0)
            n0 = gl.load(a_scale + ahead * stride_ak_scale + at0)
            n1 = n0
            if WAVES == 2:
                n1 = gl.load(a_scale + ahead * stride_ak_scale + at1)
        p0 = warpgroup_mma_wait(0, deps=(p0,))
        if WAVES == 1:
            mbarrier.arrive(empty.index(s), count=1)
        if BLOCKS:
            sums0 += p0 * f0[:, None]
        else:
            sums0 += p0
        if WAVES == 2:
            sums0 = warpgroup_mma_wait(0, deps=(sums0,))  # nothing is in flight: keeps these sums before the next
            if TURNS:
                mbarrier.wait(turn.index(WHICH), WHICH)
            p1 = warpgroup_mma(a.slice(FIRST + 64, 64), b, p0, use_acc=False, is_async=True)
            if TURNS:
                mbarrier.arrive(turn.index(1 - WHICH), count=1)
            p1 = warpgroup_mma_wait(0, deps=(p1,))
            mbarrier.arrive(empty.index(s), count=1)
            if BLOCKS:
                sums1 += p1 * f1[:, None]
            else:
                sums1 += p1
            sums1 = warpgroup_mma_wait(0, deps=(sums1,))
        step += 1
    return sums0, sums1


@gluon.jit
def finished(
    sums, a_scale, b_scale, bias, row, end, column, n, stride_am_scale, stride_bn_scale, stride_bias,
    BLOCKS: gl.constexpr, HAS_BIAS: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """The sums of 64 rows with what is multiplied in and added once."""
    columns = gl.minimum(column + gl.arange(0, sums.shape[1], gl.SliceLayout(0, layout)), n - 1)
    if BLOCKS:
        sums = sums * LEFT_OF_BOTH
    else:
        rows = gl.minimum(row + gl.arange(0, 64, gl.SliceLayout(1, layout)), end - 1)
        first, last = halves_of(gl.load(a_scale + rows * stride_am_scale))
        of_columns = gl.load(b_scale + columns * stride_bn_scale)
        sums = sums * first[:, None] * of_columns[None, :] * last[:, None]
    if HAS_BIAS:
        sums = sums + gl.load(bias + columns * stride_bias).to(gl.float32)[None, :]
    return sums


@gluon.jit
def store_rows(made, out, row, end, column, n, stride_om, stride_on, layout: gl.constexpr):
    """Store 64 rows of the result, from `row` on and before `end`, by pointers."""
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    columns = gl.arange(0, made.shape[1], gl.SliceLayout(0, layout))
    at = out + row.to(gl.int64) * stride_om + column.to(gl.int64) * stride_on
    kept = (rows < end - row)[:, None] & (columns < n - column)[None, :]
    gl.store(at + rows[:, None] * stride_om + columns[None, :] * stride_on, made, mask=kept)
