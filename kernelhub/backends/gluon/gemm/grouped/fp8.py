# mypy: ignore-errors
"""Grouped products of float8 rows on Hopper: the programs of `fp8/product.py`, over the tiles of all groups.

A tile whose group ends in it also multiplies rows of the next group, by the wrong weights, and does not store them: so
nothing is padded or moved. A warpgroup whose rows are all behind the end of the group waits, and multiplies nothing.
Results are stored by pointers with a mask, since the rows behind a group's last belong to another.
"""

from __future__ import annotations

from kernelhub.backends.gluon.gemm.grouped.groups import first_tile, group_at
from kernelhub.backends.gluon.gemm.order import tile_of
from kernelhub.backends.gluon.gemm.scaled_sums import finished, scaled_sums, store_rows
from kernelhub.backends.gluon.language import fence_async_shared, gl, gluon, mbarrier, tma_load


@gluon.jit
def load_groups(
    a_desc, b_desc, a_bufs, b_bufs, full, empty, lengths, groups, total, room, tiles_n, k, rows_of_b,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    GROUP: gl.constexpr
):  # fmt: skip
    """BN columns of a tile come as blocks of 128 rows of weights."""
    ACROSS: gl.constexpr = BN // 128
    step = 0
    before = 0
    begin = 0
    programs = gl.num_programs(0)
    for g in range(groups):
        first, size, before = group_at(lengths, g, before, total, MASKED)
        if MASKED:
            first = g * room
        tiles_m = gl.cdiv(size, BM)
        end = begin + tiles_m * tiles_n
        for tile in range(first_tile(begin), end, programs):
            tm, tn = tile_of(tile - begin, tiles_m, tiles_n, GROUP)
            at_a = first + tm * BM
            at_b = g * rows_of_b + tn * BN
            for kb in range(gl.cdiv(k, BK)):
                s = step % STAGES
                mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(s), a_desc.block_type.nbytes + ACROSS * b_desc.block_type.nbytes)
                tma_load(a_desc, [at_a, kb * BK], full.index(s), a_bufs.index(s))
                for i in gl.static_range(ACROSS):
                    tma_load(b_desc, [at_b + i * 128, kb * BK], full.index(s), b_bufs.index(s * ACROSS + i))
                step += 1
        begin = end


@gluon.jit
def skip_stages(full, empty, step, blocks, STAGES: gl.constexpr):
    """Pass on the stages of a tile none of whose rows exist."""
    for _ in range(blocks):
        s = step % STAGES
        mbarrier.wait(full.index(s), (step // STAGES) & 1)
        mbarrier.arrive(empty.index(s), count=1)
        step += 1


@gluon.jit
def multiply_groups(
    out, a_bufs, b_bufs, full, empty, a_scale, b_scale, bias, lengths, groups, total, tiles_n, n, k,
    stride_ag_scale, stride_am_scale, stride_ak_scale, stride_bg_scale, stride_bn_scale, stride_bk_scale,
    stride_bias_g, stride_bias_n, stride_og, stride_om, stride_on,
    WHICH: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, WAVES: gl.constexpr, STAGES: gl.constexpr,
    BLOCKS: gl.constexpr, A_E8M0: gl.constexpr, B_E8M0: gl.constexpr, HAS_BIAS: gl.constexpr, MASKED: gl.constexpr,
    GROUP: gl.constexpr
):  # fmt: skip
    """The warpgroup WHICH of two, whose rows are the WHICH-th half of each tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 32])
    ROWS: gl.constexpr = BM // 2
    step = 0
    before = 0
    begin = 0
    blocks = gl.cdiv(k, 128)
    programs = gl.num_programs(0)
    for g in range(groups):
        first, size, before = group_at(lengths, g, before, total, MASKED)
        group = g.to(gl.int64)
        if MASKED:
            a_from = a_scale + group * stride_ag_scale
            out_from = out + group * stride_og
        else:
            a_from = a_scale + first.to(gl.int64) * stride_am_scale
            out_from = out + first.to(gl.int64) * stride_om
        b_from = b_scale + group * stride_bg_scale
        bias_from = bias
        if HAS_BIAS:
            bias_from = bias + group * stride_bias_g
        tiles_m = gl.cdiv(size, BM)
        end = begin + tiles_m * tiles_n
        for tile in range(first_tile(begin), end, programs):
            tm, tn = tile_of(tile - begin, tiles_m, tiles_n, GROUP)
            row = tm * BM + WHICH * ROWS
            column = tn * BN
            if row < size:
                b_at = b_from
                if BLOCKS:
                    b_at = b_from + (column // 128) * stride_bn_scale
                sums0, sums1 = scaled_sums(
                    a_bufs, b_bufs, full, empty, full, step, blocks, a_from, row, size, stride_am_scale,
                    stride_ak_scale, b_at, stride_bk_scale, WHICH, BN, WAVES, STAGES, BLOCKS, A_E8M0, B_E8M0, False,
                    layout
                )  # fmt: skip
                made = finished(
                    sums0, a_from, b_from, bias_from, row, size, column, n, stride_am_scale, stride_bn_scale,
                    stride_bias_n, BLOCKS, HAS_BIAS, layout
                )  # fmt: skip
                store_rows(made.to(out.dtype.element_ty), out_from, row, size, column, n, stride_om, stride_on, layout)
                if WAVES == 2:
                    made = finished(
                        sums1, a_from, b_from, bias_from, row + 64, size, column, n, stride_am_scale, stride_bn_scale,
                        stride_bias_n, BLOCKS, HAS_BIAS, layout
                    )  # fmt: skip
                    store_rows(
                        made.to(out.dtype.element_ty), out_from, row + 64, size, column, n, stride_om, stride_on, layout
                    )
            else:
                skip_stages(full, empty, step, blocks, STAGES)
            step += blocks
        begin = end


@gluon.jit(
    do_not_specialize=["total", "room", "k", "groups", "rows_of_b"],
    do_not_specialize_on_alignment=["a_scale", "b_scale", "bias", "lengths"],
)
def grouped_fp8_kernel(
    a_desc, b_desc, out, a_scale, b_scale, bias, lengths, groups, total, room, n, k, rows_of_b,
    stride_ag_scale, stride_am_scale, stride_ak_scale, stride_bg_scale, stride_bn_scale, stride_bk_scale,
    stride_bias_g, stride_bias_n, stride_og, stride_om, stride_on,
    BM: gl.constexpr, BN: gl.constexpr, WAVES: gl.constexpr, STAGES: gl.constexpr, BLOCKS: gl.constexpr,
    A_E8M0: gl.constexpr, B_E8M0: gl.constexpr, HAS_BIAS: gl.constexpr, MASKED: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """Rows of each group times the weights of the group.

    `a_desc` has all rows: those of group g from where the group before ends, or MASKED from g * room on. `b_desc` has
    the weights of all groups, those of g from g * rows_of_b on. `total` is the number of rows, or MASKED of a group's
    places.
    """
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BM, 128], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BN, 128], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    tiles_n = gl.cdiv(n, BN)
    gl.warp_specialize(
        [
            (multiply_groups, (
                out, a_bufs, b_bufs, full, empty, a_scale, b_scale, bias, lengths, groups, total, tiles_n, n, k,
                stride_ag_scale, stride_am_scale, stride_ak_scale, stride_bg_scale, stride_bn_scale, stride_bk_scale,
                stride_bias_g, stride_bias_n, stride_og, stride_om, stride_on,
                0, BM, BN, WAVES, STAGES, BLOCKS, A_E8M0, B_E8M0, HAS_BIAS, MASKED, GROUP
            )),
            (multiply_groups, (
                out, a_bufs, b_bufs, full, empty, a_scale, b_scale, bias, lengths, groups, total, tiles_n, n, k,
                stride_ag_scale, stride_am_scale, stride_ak_scale, stride_bg_scale, stride_bn_scale, stride_bk_scale,
                stride_bias_g, stride_bias_n, stride_og, stride_om, stride_on,
                1, BM, BN, WAVES, STAGES, BLOCKS, A_E8M0, B_E8M0, HAS_BIAS, MASKED, GROUP
            )),
            (load_groups, (
                a_desc, b_desc, a_bufs, b_bufs, full, empty, lengths, groups, total, room, tiles_n, k, rows_of_b,
                BM, BN, 128, STAGES, MASKED, GROUP
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
