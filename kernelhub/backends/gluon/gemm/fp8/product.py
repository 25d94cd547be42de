# mypy: ignore-errors
"""A product of float8 matrices on Hopper: persistent programs of one loading warp and two multiplying warpgroups.

    loader:      for each tile, for each 128 columns of K: wait until a stage is empty; fetch a and b into it by TMA
    multipliers: for each tile, for each 128 columns of K: wait for the stage;
                     for each 64 of its rows: part = a . bT in the tensor cores; sums += part (* scales of the block)
                 sums *= scales of rows, where there are such; + bias; store

What the multipliers do is in `scaled_sums.py`. Rows and columns that do not exist are read as zero by TMA, and not
stored.
"""

from __future__ import annotations

from kernelhub.backends.gluon.gemm.order import tile_of
from kernelhub.backends.gluon.gemm.scaled_sums import finished, scaled_sums, store_rows
from kernelhub.backends.gluon.language import fence_async_shared, gl, gluon, mbarrier, tma, tma_load, tma_store


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
def multiply_tiles(
    c_desc, out, a_bufs, b_bufs, c_buf, full, empty, turn, a_scale, b_scale, bias, tiles_m, tiles_n, m, n, k,
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
        b_at = b_scale
        if BLOCKS:
            b_at = b_scale + (column // 128) * stride_bn_scale
        sums0, sums1 = scaled_sums(
            a_bufs, b_bufs, full, empty, turn, step, blocks, a_scale, row, m, stride_am_scale, stride_ak_scale, b_at,
            stride_bk_scale, WHICH, BN, WAVES, STAGES, BLOCKS, A_E8M0, B_E8M0,
            BLOCKS and WAVES == 2, layout
        )  # fmt: skip
        step += blocks
        sums0 = finished(
            sums0, a_scale, b_scale, bias, row, m, column, n, stride_am_scale, stride_bn_scale, stride_bias,
            BLOCKS, HAS_BIAS, layout
        ).to(out.dtype.element_ty)  # fmt: skip
        if WAVES == 2:
            sums1 = finished(
                sums1, a_scale, b_scale, bias, row + 64, m, column, n, stride_am_scale, stride_bn_scale, stride_bias,
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
            store_rows(sums0, out, row, m, column, n, stride_om, stride_on, layout)
            if WAVES == 2:
                store_rows(sums1, out, row + 64, m, column, n, stride_om, stride_on, layout)
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
    turn = full  # not used unless it is replaced: see `language.py` for barriers that nothing uses
    if BLOCKS and WAVES == 2:
        turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for w in gl.static_range(2):
            mbarrier.init(turn.index(w), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    tiles_m = gl.cdiv(m, BM)
    tiles_n = gl.cdiv(n, BN)
    gl.warp_specialize(
        [
            (multiply_tiles, (
                c_desc, out, a_bufs, b_bufs, c_buf, full, empty, turn, a_scale, b_scale, bias, tiles_m, tiles_n, m, n,
                k, stride_am_scale, stride_ak_scale, stride_bn_scale, stride_bk_scale, stride_bias, stride_om,
                stride_on,
                0, BM, BN, WAVES, GROUP, STAGES, BLOCKS, A_E8M0, B_E8M0, HAS_BIAS, BY_TMA
            )),
            (multiply_tiles, (
                c_desc, out, a_bufs, b_bufs, c_buf, full, empty, turn, a_scale, b_scale, bias, tiles_m, tiles_n, m, n,
                k, stride_am_scale, stride_ak_scale, stride_bn_scale, stride_bk_scale, stride_bias, stride_om,
                stride_on,
                1, BM, BN, WAVES, GROUP, STAGES, BLOCKS, A_E8M0, B_E8M0, HAS_BIAS, BY_TMA
            )),
            (load_tiles, (
                a_desc, b_desc, a_bufs, b_bufs, full, empty, tiles_m, tiles_n, k, BM, BN, GROUP, STAGES
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
