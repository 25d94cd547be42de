# mypy: ignore-errors
"""A product of float8 matrices on Hopper: persistent programs of one loading warp and two multiplying warpgroups.

    loader:      for each tile, for each 128 columns of K: wait until a stage is empty; fetch a and b into it by TMA
    multipliers: for each tile, for each 128 columns of K: wait for the stage;
                     for each 64 of its rows: part = a . bT in the tensor cores; sums += part (* scales of the block)
                 sums *= scales of rows, where there are such; + bias; store

The tensor cores add in 14 bits, so what 128 columns give is moved to float32 (DeepSeek-V3, section 3.3). While one
warpgroup does that the other multiplies. Each holds WAVES x 64 rows; the product of the second 64 reuses the registers
of the first. Rows and columns that do not exist are read as zero and not stored, by TMA. Scales are read one step
ahead, from any strides, straight into registers.

Three things keep ptxas from spilling and from waiting early (each was a slower version): `warpgroup_mma_wait` on sums
while nothing is in flight, `use_acc=False` with the last product as the accumulator, and int32 offsets of rows.
"""

from __future__ import annotations

from kernelhub.backends.gluon.language import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    tma_load,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from kernelhub.backends.gluon.scales import LEFT_OF_BOTH, halves_of, number, of_both


@gluon.jit
def tile_of(t, tiles_m, tiles_n, GROUP: gl.constexpr):
    """(row, column) of a tile: GROUP rows of tiles are gone over together, so that they share b in L2."""
    wide = GROUP * tiles_n
    first = t // wide * GROUP
    high = gl.minimum(tiles_m - first, GROUP)
    within = t % wide
    return first + within % high, within // high


@gluon.jit
def load_tiles(
    a_desc, b_desc, a_bufs, b_bufs, full, empty, tiles_m, tiles_n, k, BM: gl.constexpr, BN: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    step = 0
    for t in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tm, tn = tile_of(t, tiles_m, tiles_n, GROUP)
        for kb in range(gl.cdiv(k, 128)):
            s = step % STAGES
            mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(s), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            tma_load(a_desc, [tm * BM, kb * 128], full.index(s), a_bufs.index(s))
            tma_load(b_desc, [tn * BN, kb * 128], full.index(s), b_bufs.index(s))
            step += 1


@gluon.jit
def store_rows(sums, out, row, m, n, column, stride_om, stride_on, layout: gl.constexpr):
    """Store 64 rows, from `row` of the result on, by pointers: for results that TMA cannot write."""
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    columns = gl.arange(0, sums.shape[1], gl.SliceLayout(0, layout))
    at = out + row.to(gl.int64) * stride_om + column.to(gl.int64) * stride_on
    kept = (rows < m - row)[:, None] & (columns < n - column)[None, :]
    gl.store(at + rows[:, None] * stride_om + columns[None, :] * stride_on, sums, mask=kept)


@gluon.jit
def finished(
    sums, a_scale, b_scale, bias, row, m, n, column, stride_am_scale, stride_bn_scale, stride_bias,
    BLOCKS: gl.constexpr, HAS_BIAS: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """The sums of 64 rows with what is multiplied in and added once."""
    columns = gl.minimum(column + gl.arange(0, sums.shape[1], gl.SliceLayout(0, layout)), n - 1)
    if BLOCKS:
        sums = sums * LEFT_OF_BOTH
    else:
        rows = gl.minimum(row + gl.arange(0, 64, gl.SliceLayout(1, layout)), m - 1)
        first, last = halves_of(gl.load(a_scale + rows * stride_am_scale))
        of_columns = gl.load(b_scale + columns * stride_bn_scale)
        sums = sums * first[:, None] * of_columns[None, :] * last[:, None]
    if HAS_BIAS:
        sums = sums + gl.load(bias + columns * stride_bias).to(gl.float32)[None, :]
    return sums


@gluon.jit
def multiply_tiles(
    c_desc, out, a_bufs, b_bufs, c_buf, full, empty, a_scale, b_scale, bias, tiles_m, tiles_n, m, n, k,
    stride_am_scale, stride_ak_scale, stride_bn_scale, stride_bk_scale, stride_bias, stride_om, stride_on,
    WHICH: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, WAVES: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, BLOCKS: gl.constexpr, A_E8M0: gl.constexpr, B_E8M0: gl.constexpr, HAS_BIAS: gl.constexpr,
    BY_TMA: gl.constexpr
):  # fmt: skip
    """The warpgroup WHICH of two, whose rows are the WHICH-th half of each tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 32])
    ROWS: gl.constexpr = BM // 2
    step = 0
    blocks = gl.cdiv(k, 128)
    for t in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tm, tn = tile_of(t, tiles_m, tiles_n, GROUP)
        row = tm * BM + WHICH * ROWS
        column = tn * BN
        sums0 = gl.zeros((64, BN), gl.float32, layout)
        sums1 = gl.zeros((64, BN), gl.float32, layout)
        zero = gl.zeros((64, BN), gl.float32, layout)
        if BLOCKS:
            within = gl.arange(0, 64, gl.SliceLayout(1, layout))
            at0 = gl.minimum(row + within, m - 1) * stride_am_scale
            at1 = gl.minimum(row + 64 + within, m - 1) * stride_am_scale
            b_at = b_scale + (column // 128) * stride_bn_scale
            fb = number(gl.load(b_at), B_E8M0)
            f0 = of_both(number(gl.load(a_scale + at0), A_E8M0), fb)
            f1 = f0
            if WAVES == 2:
                f1 = of_both(number(gl.load(a_scale + at1), A_E8M0), fb)
        for kb in range(blocks):
            s = step % STAGES
            mbarrier.wait(full.index(s), (step // STAGES) & 1)
            b = b_bufs.index(s).permute((1, 0))
            a = a_bufs.index(s)
            p0 = warpgroup_mma(a.slice(WHICH * ROWS, 64), b, zero, use_acc=False, is_async=True)
            if BLOCKS:
                ahead = gl.minimum(kb + 1, blocks - 1)
                nb = number(gl.load(b_at + ahead * stride_bk_scale), B_E8M0)
                n0 = number(gl.load(a_scale + ahead * stride_ak_scale + at0), A_E8M0)
                n1 = n0
                if WAVES == 2:
                    n1 = number(gl.load(a_scale + ahead * stride_ak_scale + at1), A_E8M0)
            p0 = warpgroup_mma_wait(0, deps=(p0,))
            if WAVES == 1:
                mbarrier.arrive(empty.index(s), count=1)
            if BLOCKS:
                sums0 += p0 * f0[:, None]
            else:
                sums0 += p0
            if WAVES == 2:
                sums0 = warpgroup_mma_wait(0, deps=(sums0,))  # nothing is in flight: keeps these sums before the next
                p1 = warpgroup_mma(a.slice(WHICH * ROWS + 64, 64), b, p0, use_acc=False, is_async=True)
                p1 = warpgroup_mma_wait(0, deps=(p1,))
                mbarrier.arrive(empty.index(s), count=1)
                if BLOCKS:
                    sums1 += p1 * f1[:, None]
                else:
                    sums1 += p1
                sums1 = warpgroup_mma_wait(0, deps=(sums1,))
            if BLOCKS:
                f0 = of_both(n0, nb)
                f1 = f0
                if WAVES == 2:
                    f1 = of_both(n1, nb)
            step += 1
        sums0 = finished(
            sums0, a_scale, b_scale, bias, row, m, n, column, stride_am_scale, stride_bn_scale, stride_bias,
            BLOCKS, HAS_BIAS, layout
        ).to(out.dtype.element_ty)  # fmt: skip
        if WAVES == 2:
            sums1 = finished(
                sums1, a_scale, b_scale, bias, row + 64, m, n, column, stride_am_scale, stride_bn_scale, stride_bias,
                BLOCKS, HAS_BIAS, layout
            ).to(out.dtype.element_ty)  # fmt: skip
        if BY_TMA:
            tma.store_wait(0)
            c = c_buf.index(WHICH)
            c.slice(0, 64).store(sums0)
            if WAVES == 2:
                c.slice(64, 64).store(sums1)
            fence_async_shared()
            tma_store(c_desc, [row, column], c)
        else:
            store_rows(sums0, out, row, m, n, column, stride_om, stride_on, layout)
            if WAVES == 2:
                store_rows(sums1, out, row + 64, m, n, column, stride_om, stride_on, layout)
    if BY_TMA:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["m", "n", "k"], do_not_specialize_on_alignment=["a_scale", "b_scale", "bias"])
def product_kernel(
    a_desc, b_desc, c_desc, out, a_scale, b_scale, bias, m, n, k,
    stride_am_scale, stride_ak_scale, stride_bn_scale, stride_bk_scale, stride_bias, stride_om, stride_on,
    BM: gl.constexpr, BN: gl.constexpr, WAVES: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    BLOCKS: gl.constexpr, A_E8M0: gl.constexpr, B_E8M0: gl.constexpr, HAS_BIAS: gl.constexpr, BY_TMA: gl.constexpr
):  # fmt: skip
    """out [m, n] = a [m, k] . b [n, k]T.

    With BLOCKS a scale of a is for a row and 128 columns, one of b for 128 x 128; else for a row of a and a row of b,
    or with strides of 0 for all. BY_TMA writes through `c_desc`, else `out` and its strides are used.
    """
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BM, 128], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BN, 128], b_desc.layout)
    c_buf = b_bufs  # not used unless it is replaced
    if BY_TMA:
        c_buf = gl.allocate_shared_memory(c_desc.dtype, [2, BM // 2, BN], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    tiles_m = gl.cdiv(m, BM)
    tiles_n = gl.cdiv(n, BN)
    gl.warp_specialize(
        [
            (multiply_tiles, (
                c_desc, out, a_bufs, b_bufs, c_buf, full, empty, a_scale, b_scale, bias, tiles_m, tiles_n, m, n, k,
                stride_am_scale, stride_ak_scale, stride_bn_scale, stride_bk_scale, stride_bias, stride_om, stride_on,
                0, BM, BN, WAVES, GROUP, STAGES, BLOCKS, A_E8M0, B_E8M0, HAS_BIAS, BY_TMA
            )),
            (multiply_tiles, (
                c_desc, out, a_bufs, b_bufs, c_buf, full, empty, a_scale, b_scale, bias, tiles_m, tiles_n, m, n, k,
                stride_am_scale, stride_ak_scale, stride_bn_scale, stride_bk_scale, stride_bias, stride_om, stride_on,
                1, BM, BN, WAVES, GROUP, STAGES, BLOCKS, A_E8M0, B_E8M0, HAS_BIAS, BY_TMA
            )),
            (load_tiles, (
                a_desc, b_desc, a_bufs, b_bufs, full, empty, tiles_m, tiles_n, k, BM, BN, GROUP, STAGES
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
