# mypy: ignore-errors
"""Grouped products of bfloat16 or float16 rows on Hopper: as `fp8.py`, with sums that stay in the tensor cores.

Each of two warpgroups holds 64 rows and 256 columns. While one waits for its product the other multiplies.
"""

from __future__ import annotations

from kernelhub.backends.gluon.gemm.grouped.fp8 import load_groups, skip_stages
from kernelhub.backends.gluon.gemm.grouped.groups import first_tile, group_at
from kernelhub.backends.gluon.gemm.scaled_sums import store_rows
from kernelhub.backends.gluon.language import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def multiply_groups(
    out, a_bufs, b_bufs, full, empty, bias, lengths, groups, total, tiles_n, n, k, stride_bias_g, stride_bias_n,
    stride_og, stride_om, stride_on, WHICH: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, HAS_BIAS: gl.constexpr, MASKED: gl.constexpr
):  # fmt: skip
    """The warpgroup WHICH of two, which has 64 rows of each tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
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
        tiles_m = gl.cdiv(size, BM)
        end = begin + tiles_m * tiles_n
        for tile in range(first_tile(begin), end, programs):
            row = (tile - begin) % tiles_m * BM + WHICH * 64
            column = (tile - begin) // tiles_m * BN
            if row < size:
                sums = gl.zeros((64, BN), gl.float32, layout)
                at = step
                for _ in range(blocks):
                    s = at % STAGES
                    mbarrier.wait(full.index(s), (at // STAGES) & 1)
                    a = a_bufs.index(s).slice(WHICH * 64, 64)
                    sums = warpgroup_mma(a, b_bufs.index(s).permute((1, 0)), sums, is_async=True)
                    sums = warpgroup_mma_wait(0, deps=(sums,))
                    mbarrier.arrive(empty.index(s), count=1)
                    at += 1
                if HAS_BIAS:
                    columns = gl.minimum(column + gl.arange(0, BN, gl.SliceLayout(0, layout)), n - 1)
                    bias_from = bias + g.to(gl.int64) * stride_bias_g
                    sums = sums + gl.load(bias_from + columns * stride_bias_n).to(gl.float32)[None, :]
                made = sums.to(out.dtype.element_ty)
                store_rows(made, out_from, row, size, column, n, stride_om, stride_on, layout)
            else:
                skip_stages(full, empty, step, blocks, STAGES)
            step += blocks
        begin = end


@gluon.jit(
    do_not_specialize=["total", "room", "k", "groups", "rows_of_b"],
    do_not_specialize_on_alignment=["bias", "lengths"],
)
def grouped_halves_kernel(
    a_desc, b_desc, out, bias, lengths, groups, total, room, n, k, rows_of_b, stride_bias_g, stride_bias_n,
    stride_og, stride_om, stride_on, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr, MASKED: gl.constexpr
):  # fmt: skip
    """Rows of each group times the weights of the group; operands as of `grouped_fp8_kernel`."""
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BM, BK], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BN, BK], b_desc.layout)
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
                stride_bias_n, stride_og, stride_om, stride_on, 0, BM, BN, BK, STAGES, HAS_BIAS, MASKED
            )),
            (multiply_groups, (
                out, a_bufs, b_bufs, full, empty, bias, lengths, groups, total, tiles_n, n, k, stride_bias_g,
                stride_bias_n, stride_og, stride_om, stride_on, 1, BM, BN, BK, STAGES, HAS_BIAS, MASKED
            )),
            (load_groups, (
                a_desc, b_desc, a_bufs, b_bufs, full, empty, lengths, groups, total, room, tiles_n, k, rows_of_b,
                BM, BN, BK, STAGES, MASKED
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
