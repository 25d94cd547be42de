# mypy: ignore-errors
"""A product of bfloat16 or float16 rows that were sorted by expert with the weights of their experts, on Hopper.

As `product.py`, in steps of 64 columns of K and without scales: sums stay in the tensor cores (`halves_sums.py`).

    loader:      for each tile, for each 64 columns of K: wait until a stage is empty; fetch rows, gathered if FIRST,
                 and two blocks of 128 rows of weights into it
    multipliers: for each tile, for each 64 columns of K: wait for the stage; issue sums += rows . blockT for both
                 blocks; wait for those of the stage before, which is then empty
                 FIRST: activation(gate) * up; store
"""

from __future__ import annotations

from kernelhub.backends.gluon.gemm.halves_sums import sums_of_two
from kernelhub.backends.gluon.gemm.order import tile_of
from kernelhub.backends.gluon.language import (
    copy_arrive,
    copy_rows,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
)
from kernelhub.backends.gluon.moe.product import joined, store_tile


@gluon.jit
def load_tiles(
    a, a_desc, b_desc, a_bufs, b_bufs, full, empty, sorted_pairs, tile_experts, tile_rows, tile_ends, tiles, across,
    apart, eights, eights_apart, rows_of_b, TOP_K: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
    FIRST: gl.constexpr, TAIL: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """`across` tiles of columns for each tile of rows; the second block begins `apart` rows after the first.

    Rows of `a` are 8 * `eights_apart` apart and 8 * `eights` wide: so the compiler knows that they are aligned. TAIL:
    the last step has fewer than 64 columns, and what lies behind them is another's.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    WIDTH: gl.constexpr = 128 if FIRST else 256
    step = 0
    blocks = gl.cdiv(eights, 8)
    for t in range(gl.program_id(0), tiles * across, gl.num_programs(0)):
        tile, across_at = tile_of(t, tiles, across, GROUP)
        at_a = gl.load(tile_rows + tile)
        at_b = gl.load(tile_experts + tile) * rows_of_b + across_at * WIDTH
        if FIRST:
            place = gl.minimum(at_a + gl.arange(0, BM, gl.SliceLayout(1, layout)), gl.load(tile_ends + tile) - 1)
            token = gl.load(sorted_pairs + place) // TOP_K
            columns = gl.arange(0, 64, gl.SliceLayout(0, layout))
            rows = token[:, None] * (eights_apart * 8) + columns[None, :]
        for kb in range(blocks):
            s = step % STAGES
            mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
            if FIRST:
                mbarrier.expect(full.index(s), 2 * b_desc.block_type.nbytes)
                if TAIL:
                    there = (kb * 64 + columns < eights * 8)[None, :]
                    copy_rows(a_bufs.index(s), a + kb * 64 + rows, mask=there)
                else:
                    copy_rows(a_bufs.index(s), a + kb * 64 + rows)
                copy_arrive(full.index(s), increment_count=False)
            else:
                mbarrier.expect(full.index(s), a_desc.block_type.nbytes + 2 * b_desc.block_type.nbytes)
                tma_load(a_desc, [at_a, kb * 64], full.index(s), a_bufs.index(s))
            tma_load(b_desc, [at_b, kb * 64], full.index(s), b_bufs.index(2 * s))
            tma_load(b_desc, [at_b + apart, kb * 64], full.index(s), b_bufs.index(2 * s + 1))
            step += 1


@gluon.jit
def multiply_tile(
    out, a_bufs, b_bufs, full, empty, bias, router, sorted_pairs, expert, row, left, column, step, blocks, apart, n,
    stride_bias_e, stride_bias_n, stride_wt, stride_wk, stride_om, alpha, limit, ROW: gl.constexpr,
    COLUMN: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, TOP_K: gl.constexpr, HAS_BIAS: gl.constexpr,
    ON_INPUT: gl.constexpr, FIRST: gl.constexpr, ACTIVATION: gl.constexpr, BY_LINES: gl.constexpr
):  # fmt: skip
    """What a warpgroup does for a tile: the 64 rows from `row` on, of which `left` exist, COLUMNS of each block."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    # BY_LINES: a warp stores whole lines of memory, and its registers go through shared memory for that.
    ACROSS: gl.constexpr = COLUMNS // 8
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    stored: gl.constexpr = lines if BY_LINES else layout
    sums0, sums1 = sums_of_two(a_bufs, b_bufs, full, empty, step, blocks, ROW, COLUMN, COLUMNS, STAGES, FIRST, layout)
    if ON_INPUT:
        rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
        pair = gl.load(sorted_pairs + row + gl.minimum(rows, left - 1))
        weight = gl.load(router + (pair // TOP_K).to(gl.int64) * stride_wt + pair % TOP_K * stride_wk)
        sums0 = sums0 * weight[:, None]
        sums1 = sums1 * weight[:, None]
    if HAS_BIAS:
        columns = column + COLUMN + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
        at = bias + expert * stride_bias_e
        sums0 += gl.load(at + gl.minimum(columns, n - 1) * stride_bias_n).to(gl.float32)[None, :]
        columns = gl.minimum(columns + apart, apart + n - 1 if FIRST else n - 1)
        sums1 += gl.load(at + columns * stride_bias_n).to(gl.float32)[None, :]
    out_at = out + row.to(gl.int64) * stride_om
    if FIRST:
        made = joined(sums0, sums1, alpha, limit, ACTIVATION).to(out.dtype.element_ty)
        store_tile(gl.convert_layout(made, stored), out_at, left, column + COLUMN, n, stride_om, stored)
    else:
        made = sums0.to(out.dtype.element_ty)
        store_tile(gl.convert_layout(made, stored), out_at, left, column + COLUMN, n, stride_om, stored)
        made = sums1.to(out.dtype.element_ty)
        store_tile(gl.convert_layout(made, stored), out_at, left, column + 128 + COLUMN, n, stride_om, stored)


@gluon.jit
def multiply_tiles(
    out, a_bufs, b_bufs, full, empty, bias, router, sorted_pairs, tile_experts, tile_rows, tile_ends, tiles, across,
    apart, n, eights, stride_bias_e, stride_bias_n, stride_wt, stride_wk, stride_om, alpha, limit,
    WHICH: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, TOP_K: gl.constexpr, HAS_BIAS: gl.constexpr,
    ON_INPUT: gl.constexpr, FIRST: gl.constexpr, ACTIVATION: gl.constexpr, BY_LINES: gl.constexpr,
    GROUP: gl.constexpr
):  # fmt: skip
    """The warpgroup WHICH of two: the WHICH-th 64 rows of a tile, or of one with up to 64 rows half the columns."""
    WIDTH: gl.constexpr = 128 if FIRST else 256
    step = 0
    blocks = gl.cdiv(eights, 8)
    for t in range(gl.program_id(0), tiles * across, gl.num_programs(0)):
        tile, across_at = tile_of(t, tiles, across, GROUP)
        row = gl.load(tile_rows + tile)
        left = gl.load(tile_ends + tile) - row
        expert = gl.load(tile_experts + tile).to(gl.int64)
        column = across_at * WIDTH
        halves = left <= BM // 2
        if BM == 64:
            halves = left > 0
        if halves:
            multiply_tile(
                out, a_bufs, b_bufs, full, empty, bias, router, sorted_pairs, expert, row, left, column, step, blocks,
                apart, n, stride_bias_e, stride_bias_n, stride_wt, stride_wk, stride_om, alpha, limit, 0, WHICH * 64,
                64, STAGES, TOP_K, HAS_BIAS, ON_INPUT, FIRST, ACTIVATION, BY_LINES
            )  # fmt: skip
        elif BM == 128:
            multiply_tile(
                out, a_bufs, b_bufs, full, empty, bias, router, sorted_pairs, expert, row + WHICH * 64,
                left - WHICH * 64, column, step, blocks, apart, n, stride_bias_e, stride_bias_n, stride_wt, stride_wk,
                stride_om, alpha, limit, WHICH * 64, 0, 128, STAGES, TOP_K, HAS_BIAS, ON_INPUT, FIRST, ACTIVATION,
                BY_LINES
            )  # fmt: skip
        step += blocks


@gluon.jit(
    do_not_specialize=[
        "across", "apart", "eights", "eights_apart", "rows_of_b", "stride_bias_e", "stride_bias_n", "stride_wt",
        "stride_wk", "alpha", "limit",
    ],
    do_not_specialize_on_alignment=[
        "bias", "router", "sorted_pairs", "tile_experts", "tile_rows", "tile_ends", "num_tiles",
    ],
)  # fmt: skip
def experts_of_halves_kernel(
    a, a_desc, b_desc, out, bias, router, sorted_pairs, tile_experts, tile_rows, tile_ends, num_tiles, across, apart,
    n, eights, eights_apart, rows_of_b, stride_bias_e, stride_bias_n, stride_wt, stride_wk, stride_om, alpha, limit,
    BM: gl.constexpr, STAGES: gl.constexpr, TOP_K: gl.constexpr, TAIL: gl.constexpr, HAS_BIAS: gl.constexpr,
    ON_INPUT: gl.constexpr, FIRST: gl.constexpr, ACTIVATION: gl.constexpr, BY_LINES: gl.constexpr,
    GROUP: gl.constexpr
):  # fmt: skip
    """out [rows, n] of rows and the weights of all experts, of which those of e are from e * rows_of_b on.

    FIRST: row r is that of the token sorted_pairs[r] // TOP_K in `a`; weights are gate and, `apart` rows later, up,
    both of n rows, and `out` gets activation(gate) * up. Otherwise rows are those of `a_desc`, weights have n rows and
    `apart` is 128. ON_INPUT: sums are first multiplied by `router` of the pair. A tile has BM rows from `tile_rows` on,
    of which those before `tile_ends` belong to `tile_experts`. Rows have 8 * `eights` columns.
    """
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BM, 64], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [2 * STAGES, 128, 64], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=129 if FIRST else 1)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    tiles = gl.load(num_tiles)
    gl.warp_specialize(
        [
            (multiply_tiles, (
                out, a_bufs, b_bufs, full, empty, bias, router, sorted_pairs, tile_experts, tile_rows, tile_ends, tiles,
                across, apart, n, eights, stride_bias_e, stride_bias_n, stride_wt, stride_wk, stride_om, alpha, limit,
                0, BM, STAGES, TOP_K, HAS_BIAS, ON_INPUT, FIRST, ACTIVATION, BY_LINES, GROUP
            )),
            (multiply_tiles, (
                out, a_bufs, b_bufs, full, empty, bias, router, sorted_pairs, tile_experts, tile_rows, tile_ends, tiles,
                across, apart, n, eights, stride_bias_e, stride_bias_n, stride_wt, stride_wk, stride_om, alpha, limit,
                1, BM, STAGES, TOP_K, HAS_BIAS, ON_INPUT, FIRST, ACTIVATION, BY_LINES, GROUP
            )),
            (load_tiles, (
                a, a_desc, b_desc, a_bufs, b_bufs, full, empty, sorted_pairs, tile_experts, tile_rows, tile_ends, tiles,
                across, apart, eights, eights_apart, rows_of_b, TOP_K, BM, STAGES, FIRST, TAIL, GROUP
            )),
        ],
        [4, 4 if FIRST else 1],
        [232, 40],
    )  # fmt: skip
