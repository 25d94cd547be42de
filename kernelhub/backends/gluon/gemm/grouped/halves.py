# mypy: ignore-errors
"""Grouped products of bfloat16 or float16 rows on Hopper: as `fp8.py`, with sums that stay in the tensor cores.

A stage has rows and two blocks of 128 rows of weights. Each of two warpgroups multiplies 64 rows of a tile. Where a
tile has no more than 64, both multiply those, each by half the columns of each block.
"""

from __future__ import annotations

from kernelhub.backends.gluon.gemm.grouped.fp8 import load_groups
from kernelhub.backends.gluon.gemm.grouped.groups import first_tile, group_at
from kernelhub.backends.gluon.gemm.halves_sums import sums_of_two
from kernelhub.backends.gluon.gemm.order import tile_of
from kernelhub.backends.gluon.gemm.scaled_sums import store_rows
from kernelhub.backends.gluon.language import fence_async_shared, gl, gluon, mbarrier


@gluon.jit
def finish(
    sums, out, bias, row, size, column, n, stride_bias_n, stride_om, stride_on, HAS_BIAS: gl.constexpr,
    BY_LINES: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Add the bias to 64 rows from `row` on, and store those before `size`."""
    COLUMNS: gl.constexpr = sums.shape[1]
    # BY_LINES: a warp stores whole lines of memory, and its registers go through shared memory for that.
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    stored: gl.constexpr = lines if BY_LINES else layout
    if HAS_BIAS:
        columns = gl.minimum(column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), n - 1)
        sums = sums + gl.load(bias + columns * stride_bias_n).to(gl.float32)[None, :]
    made = gl.convert_layout(sums.to(out.dtype.element_ty), stored)
    store_rows(made, out, row, size, column, n, stride_om, stride_on, stored)


@gluon.jit
def multiply_tile(
    out, a_bufs, b_bufs, full, empty, bias, row, size, column, n, step, blocks, stride_bias_n, stride_om, stride_on,
    ROW: gl.constexpr, COLUMN: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr,
    BY_LINES: gl.constexpr
):  # fmt: skip
    """What a warpgroup does for a tile: its rows from `row` on, COLUMNS of each block."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    sums0, sums1 = sums_of_two(a_bufs, b_bufs, full, empty, step, blocks, ROW, COLUMN, COLUMNS, STAGES, False, layout)
    column += COLUMN
    finish(sums0, out, bias, row, size, column, n, stride_bias_n, stride_om, stride_on, HAS_BIAS, BY_LINES, layout)
    column += 128
    finish(sums1, out, bias, row, size, column, n, stride_bias_n, stride_om, stride_on, HAS_BIAS, BY_LINES, layout)


@gluon.jit
def multiply_groups(
    out, a_bufs, b_bufs, full, empty, bias, lengths, groups, total, tiles_n, n, k, stride_bias_g, stride_bias_n,
    stride_og, stride_om, stride_on, WHICH: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, HAS_BIAS: gl.constexpr, MASKED: gl.constexpr, BY_LINES: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """The warpgroup WHICH of two."""
    step = 0
    before = 0
    begin = 0
    blocks = gl.cdiv(k, BK)
    programs = gl.num_programs(0)
    for g in range(groups):
        first, size, before = group_at(lengths, g, before, total, MASKED)
        if MASKED:
            out_from = out + g.to(gl.int64) * stride_og
        else:
            out_from = out + first.to(gl.int64) * stride_om
        bias_from = bias
        if HAS_BIAS:
            bias_from = bias + g.to(gl.int64) * stride_bias_g
        tiles_m = gl.cdiv(size, BM)
        end = begin + tiles_m * tiles_n
        for tile in range(first_tile(begin), end, programs):
            tm, tn = tile_of(tile - begin, tiles_m, tiles_n, GROUP)
            row = tm * BM
            column = tn * BN
            halves = size - row <= 64
            if BM == 64:
                halves = size > row
            if halves:
                multiply_tile(
                    out_from, a_bufs, b_bufs, full, empty, bias_from, row, size, column, n, step, blocks, stride_bias_n,
                    stride_om, stride_on, 0, WHICH * 64, 64, STAGES, HAS_BIAS, BY_LINES
                )  # fmt: skip
            elif BM == 128:
                multiply_tile(
                    out_from, a_bufs, b_bufs, full, empty, bias_from, row + WHICH * 64, size, column, n, step, blocks,
                    stride_bias_n, stride_om, stride_on, WHICH * 64, 0, 128, STAGES, HAS_BIAS, BY_LINES
                )  # fmt: skip
            step += blocks
        begin = end


@gluon.jit(
    do_not_specialize=["total", "room", "k", "groups", "rows_of_b"],
    do_not_specialize_on_alignment=["bias", "lengths"],
)
def grouped_halves_kernel(
    a_desc, b_desc, out, bias, lengths, groups, total, room, n, k, rows_of_b, stride_bias_g, stride_bias_n,
    stride_og, stride_om, stride_on, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr, MASKED: gl.constexpr, BY_LINES: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """Rows of each group times the weights of the group; operands as of `grouped_fp8_kernel`."""
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BM, BK], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES * (BN // 128), 128, BK], b_desc.layout)
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
                out, a_bufs, b_bufs, full, empty, bias, lengths, groups, total, tiles_n, n, k, stride_bias_g,
                stride_bias_n, stride_og, stride_om, stride_on, 0, BM, BN, BK, STAGES, HAS_BIAS, MASKED, BY_LINES, GROUP
            )),
            (multiply_groups, (
                out, a_bufs, b_bufs, full, empty, bias, lengths, groups, total, tiles_n, n, k, stride_bias_g,
                stride_bias_n, stride_og, stride_om, stride_on, 1, BM, BN, BK, STAGES, HAS_BIAS, MASKED, BY_LINES, GROUP
            )),
            (load_groups, (
                a_desc, b_desc, a_bufs, b_bufs, full, empty, lengths, groups, total, room, tiles_n, k, rows_of_b,
                BM, BN, BK, STAGES, MASKED, GROUP
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
