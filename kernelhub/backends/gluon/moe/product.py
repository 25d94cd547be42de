# mypy: ignore-errors
"""A product of float8 rows that were sorted by expert with the weights of their experts, on Hopper.

    loader:      takes a tile; for each 128 columns of K: wait until a stage is empty; fetch rows and two blocks of 128
                 rows of weights into it by TMA; put products of scales beside them
    multipliers: for each tile, for each 128 columns of K: wait for the stage;
                     for each of the two blocks: part = rows . blockT in the tensor cores; sums += part * scales
                 FIRST: activation(gate) * up, and that in float8 with a scale for each row; store

The two blocks are gate and up of the same columns (FIRST), or columns that follow each other. So weights are read once
for up to 128 rows of an expert, and of the first product a quarter of the bytes is stored. Rows of the first product
are gathered where their tokens are, by cp.async, since TMA of sm_90 copies rows that follow each other.

A list of tiles says which expert's rows each has. A tile whose rows end in it also multiplies rows of the next expert,
by the wrong weights, and does not store them: nothing is padded. Two warpgroups hold 64 rows each; where a tile has no
more than 64 rows, they hold the same ones, and half the columns of each block. Such tiles take less time than others,
so programs take the next tile when they are ready for it, and not every n-th.

Source: DeepSeek-V3 (2024), section 3.3, for the scales and for sums in float32.
"""

from __future__ import annotations

from kernelhub.backends.gluon.language import (
    PropagateNan,
    copy_arrive,
    copy_rows,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    quick_exp2,
    quick_reciprocal,
    rounded_to,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from kernelhub.backends.gluon.scales import LEFT_OF_BOTH, number, of_both

_LOG2E = gl.constexpr(1.4426950408889634)
_LEAST = gl.constexpr(-3.4028234663852886e38)
_SMALLEST_AMAX = gl.constexpr(1e-10)
_E4M3_MAX = gl.constexpr(448.0)
_EVERY_NAN = gl.constexpr(PropagateNan.ALL)
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FOUR = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))


@gluon.jit
def load_tiles(
    a, a_desc, b_desc, a_bufs, b_bufs, factors, told, full, empty, a_scale, b_scale, sorted_pairs, tile_experts,
    tile_rows, tile_ends, counter, tiles, across, apart, n, k, rows_of_b, stride_am_scale, stride_ak_scale,
    stride_be_scale, stride_bn_scale, stride_bk_scale, TOP_K: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
    B_E8M0: gl.constexpr, FIRST: gl.constexpr
):  # fmt: skip
    """`across` tiles of columns for each tile of rows; the second block begins `apart` rows after the first.

    FIRST: four warps gather rows of `a`, each up to whole 128 columns wide; else one warp loads those of `a_desc`, 64
    at once. They also bring what the sums of a step are multiplied by, and say what tile it is: -1 after the last.
    """
    WARPS: gl.constexpr = 4 if FIRST else 1
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    vector: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    four: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    WIDTH: gl.constexpr = 128 if FIRST else 256
    step = 0
    blocks = gl.cdiv(k, 128)
    field = gl.arange(0, 4, four)
    t = gl.program_id(0)
    while t < tiles * across:
        after = gl.num_programs(0) + gl.atomic_add(counter if FIRST else counter + 1, 1, sem="relaxed")
        row = gl.load(tile_rows + t // across)
        left = gl.load(tile_ends + t // across) - row
        expert = gl.load(tile_experts + t // across)
        place = t % across
        column = place * WIDTH
        at_b = expert * rows_of_b + column
        within = gl.minimum(gl.arange(0, BM, vector), left - 1) + row
        if FIRST:
            within = gl.load(sorted_pairs + within) // TOP_K
            rows = gl.arange(0, BM, gl.SliceLayout(1, layout))
            there = (rows < left)[:, None]
            token = gl.load(sorted_pairs + row + gl.minimum(rows, left - 1)) // TOP_K
            rows = token[:, None] * (blocks * 128) + gl.arange(0, 128, gl.SliceLayout(0, layout))[None, :]
        a_at = a_scale + within * stride_am_scale
        b0_at = b_scale + expert.to(gl.int64) * stride_be_scale
        # The last tile's second block may be beyond the weights' last.
        second = gl.minimum((column + apart) // 128, (apart + n - 1) // 128 if FIRST else (n - 1) // 128)
        b1_at = b0_at + second * stride_bn_scale
        b0_at = b0_at + column // 128 * stride_bn_scale
        of_a = gl.load(a_at)
        of_b0 = gl.load(b0_at)
        of_b1 = gl.load(b1_at)
        say = gl.where(field == 0, expert, gl.where(field == 1, row, gl.where(field == 2, left, place)))
        for kb in range(blocks):
            s = step % STAGES
            mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
            if FIRST:
                mbarrier.expect(full.index(s), 2 * b_desc.block_type.nbytes)
            elif BM == 64:
                mbarrier.expect(full.index(s), a_desc.block_type.nbytes + 2 * b_desc.block_type.nbytes)
                tma_load(a_desc, [row, kb * 128], full.index(s), a_bufs.index(s))
            else:
                # Of a tile with up to 64 rows the others are not read.
                mbarrier.expect(full.index(s), a_desc.block_type.nbytes + 2 * b_desc.block_type.nbytes, pred=left <= 64)
                mbarrier.expect(
                    full.index(s), 2 * a_desc.block_type.nbytes + 2 * b_desc.block_type.nbytes, pred=left > 64
                )
                tma_load(a_desc, [row, kb * 128], full.index(s), a_bufs.index(s).slice(0, 64))
                tma_load(a_desc, [row + 64, kb * 128], full.index(s), a_bufs.index(s).slice(64, 64), pred=left > 64)
            tma_load(b_desc, [at_b, kb * 128], full.index(s), b_bufs.index(2 * s))
            tma_load(b_desc, [at_b + apart, kb * 128], full.index(s), b_bufs.index(2 * s + 1))
            if FIRST:
                copy_rows(a_bufs.index(s), a + kb * 128 + rows, mask=there)
                copy_arrive(full.index(s), increment_count=False)
            factors.index(2 * s).store(of_both(of_a, number(of_b0, B_E8M0)))
            factors.index(2 * s + 1).store(of_both(of_a, number(of_b1, B_E8M0)))
            told.index(s).store(say)
            mbarrier.arrive(full.index(s), count=1)
            ahead = gl.minimum(kb + 1, blocks - 1)
            of_a = gl.load(a_at + ahead * stride_ak_scale)
            of_b0 = gl.load(b0_at + ahead * stride_bk_scale)
            of_b1 = gl.load(b1_at + ahead * stride_bk_scale)
            step += 1
        t = after
    s = step % STAGES
    mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
    told.index(s).store(field * 0 - 1)
    mbarrier.arrive(full.index(s), count=130 if FIRST else 2)


@gluon.jit
def sums_of_two(
    a_bufs, b_bufs, factors, full, empty, step, blocks, ROW: gl.constexpr, COLUMN: gl.constexpr,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr, FIRST: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Sums of 64 rows, those from ROW on, with COLUMNS of both blocks of weights, less a factor of LEFT_OF_BOTH.

    The order of waits is that of `gemm/scaled_sums.py`, which says why.
    """
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    sums0 = gl.zeros((64, COLUMNS), gl.float32, layout)
    sums1 = gl.zeros((64, COLUMNS), gl.float32, layout)
    zero = gl.zeros((64, COLUMNS), gl.float32, layout)
    for _ in range(blocks):
        s = step % STAGES
        mbarrier.wait(full.index(s), (step // STAGES) & 1)
        if FIRST:
            fence_async_shared()  # threads copied the rows
        a = a_bufs.index(s).slice(ROW, 64)
        b0 = b_bufs.index(2 * s).slice(COLUMN, COLUMNS).permute((1, 0))
        b1 = b_bufs.index(2 * s + 1).slice(COLUMN, COLUMNS).permute((1, 0))
        p0 = warpgroup_mma(a, b0, zero, use_acc=False, is_async=True)
        f0 = factors.index(2 * s).slice(ROW, 64).load(of_rows)
        f1 = factors.index(2 * s + 1).slice(ROW, 64).load(of_rows)
        p0 = warpgroup_mma_wait(0, deps=(p0,))
        sums0 += p0 * f0[:, None]
        sums0 = warpgroup_mma_wait(0, deps=(sums0,))
        p1 = warpgroup_mma(a, b1, p0, use_acc=False, is_async=True)
        p1 = warpgroup_mma_wait(0, deps=(p1,))
        mbarrier.arrive(empty.index(s), count=1)
        sums1 += p1 * f1[:, None]
        sums1 = warpgroup_mma_wait(0, deps=(sums1,))
        step += 1
    return sums0, sums1


@gluon.jit
def by_sigmoid(x, y):
    """x / (1 + 2^y)"""
    return x * quick_reciprocal(1.0 + quick_exp2(y))


@gluon.jit
def joined(gate, up, alpha, limit, ACTIVATION: gl.constexpr):
    """activation(gate) * up, as `ops/moe/experts/reference.py` has it."""
    gate = gl.maximum(gate, _LEAST, propagate_nan=_EVERY_NAN)  # of which every activation is 0, not NaN
    if ACTIVATION == "silu":
        made = by_sigmoid(gate, -gate * _LOG2E) * up
    elif ACTIVATION == "gelu":
        made = gate * 0.5 * (1.0 + gl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 is sigmoid(2 z)
        twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        made = by_sigmoid(gate, -twice * _LOG2E) * up
    else:
        up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
        if ACTIVATION == "swiglu_step":
            gate = by_sigmoid(gate, -gate * _LOG2E)
            made = gl.where(gate > limit, limit, gate) * up
        else:
            gate = gl.where(gate > limit, limit, gate)
            gate = by_sigmoid(gate, -alpha * gate * _LOG2E)
            made = gate * (up + 1.0 if ACTIVATION == "swiglu_oai" else up)
    return made


@gluon.jit
def store_tile(made, out, left, column, n, stride_om, layout: gl.constexpr):
    """The first `left` of 64 rows, by pointers: rows behind an expert's last belong to another."""
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, made.shape[1], gl.SliceLayout(0, layout))
    kept = (rows < left)[:, None] & (columns < n)[None, :]
    gl.store(out + rows.to(gl.int64)[:, None] * stride_om + columns[None, :], made, mask=kept)


@gluon.jit
def multiply_tile(
    out, out_scale, a_bufs, b_bufs, factors, full, empty, maxima, known, bias, router, sorted_pairs,
    expert, row, left, column, step, shared, apart, n, k, stride_bias_e, stride_bias_n, stride_wt, stride_wk,
    stride_om, stride_out_scale, alpha, limit, WHICH: gl.constexpr, ROW: gl.constexpr, COLUMN: gl.constexpr,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr, TOP_K: gl.constexpr, HAS_BIAS: gl.constexpr, ON_INPUT: gl.constexpr,
    FIRST: gl.constexpr, ACTIVATION: gl.constexpr, HALF: gl.constexpr, BY_LINES: gl.constexpr
):  # fmt: skip
    """What a warpgroup does for a tile: the 64 rows from `row` on, of which `left` exist, COLUMNS of each block."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 32]
    )
    sums0, sums1 = sums_of_two(
        a_bufs, b_bufs, factors, full, empty, step, gl.cdiv(k, 128), ROW, COLUMN, COLUMNS, STAGES, FIRST, layout
    )  # fmt: skip
    finish_tile(
        out, out_scale, sums0, sums1, maxima, known, bias, router, sorted_pairs, expert, row, left, column, shared,
        apart, n, stride_bias_e, stride_bias_n, stride_wt, stride_wk, stride_om, stride_out_scale, alpha, limit, WHICH,
        COLUMN, COLUMNS, TOP_K, HAS_BIAS, ON_INPUT, FIRST, ACTIVATION, HALF, BY_LINES, layout
    )  # fmt: skip


@gluon.jit
def finish_tile(
    out, out_scale, sums0, sums1, maxima, known, bias, router, sorted_pairs, expert, row, left, column, shared, apart,
    n, stride_bias_e, stride_bias_n, stride_wt, stride_wk, stride_om, stride_out_scale, alpha, limit,
    WHICH: gl.constexpr, COLUMN: gl.constexpr, COLUMNS: gl.constexpr, TOP_K: gl.constexpr, HAS_BIAS: gl.constexpr,
    ON_INPUT: gl.constexpr, FIRST: gl.constexpr, ACTIVATION: gl.constexpr, HALF: gl.constexpr, BY_LINES: gl.constexpr,
    layout: gl.constexpr
):  # fmt: skip
    """What comes after the sums of 64 rows, and their store."""
    # BY_LINES: a warp stores whole lines of memory, and its registers go through shared memory for that.
    PIECES: gl.constexpr = 16 if FIRST else 8
    ACROSS: gl.constexpr = COLUMNS // PIECES
    lines: gl.constexpr = gl.BlockedLayout([1, PIECES], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    stored: gl.constexpr = lines if BY_LINES else layout
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    sums0 = sums0 * LEFT_OF_BOTH
    sums1 = sums1 * LEFT_OF_BOTH
    if ON_INPUT:
        pair = gl.load(sorted_pairs + row + gl.minimum(rows, left - 1))
        weight = gl.load(router + (pair // TOP_K).to(gl.int64) * stride_wt + pair % TOP_K * stride_wk)
        sums0 = sums0 * weight[:, None]
        sums1 = sums1 * weight[:, None]
    if HAS_BIAS:
        columns = column + COLUMN + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
        at = bias + expert.to(gl.int64) * stride_bias_e
        sums0 += gl.load(at + gl.minimum(columns, n - 1) * stride_bias_n).to(gl.float32)[None, :]
        columns = gl.minimum(columns + apart, apart + n - 1 if FIRST else n - 1)
        sums1 += gl.load(at + columns * stride_bias_n).to(gl.float32)[None, :]
    out_at = out + row.to(gl.int64) * stride_om
    if FIRST:
        made = rounded_to(joined(sums0, sums1, alpha, limit, ACTIVATION), HALF)
        largest = gl.max(gl.abs(made), 1)
        if COLUMNS == 64:  # the other warpgroup has the other half of the columns that share a scale
            # It may be a tile ahead, so two places take turns.
            place = shared % 2 * 2
            maxima.index(place + WHICH).store(largest)
            mbarrier.arrive(known.index(place + WHICH), count=1)
            mbarrier.wait(known.index(place + 1 - WHICH), shared // 2 & 1)
            largest = gl.maximum(largest, maxima.index(place + 1 - WHICH).load(gl.SliceLayout(1, layout)))
        scale = gl.div_rn(gl.where(largest > _SMALLEST_AMAX, largest, _SMALLEST_AMAX), _E4M3_MAX)
        if COLUMN == 0:
            gl.store(out_scale + column // 128 * stride_out_scale + row + rows, scale, mask=rows < left)
        # The quotient rounded to nearest: a product with the reciprocal, and one with what the first leaves.
        inverse = gl.div_rn(scale * 0.0 + 1.0, scale)[:, None] + gl.zeros_like(made)
        codes = made * inverse
        codes = gl.fma(gl.fma(-codes, scale[:, None] + gl.zeros_like(made), made), inverse, codes)
        codes = codes.to(out.dtype.element_ty)
        store_tile(gl.convert_layout(codes, stored), out_at, left, column + COLUMN, n, stride_om, stored)
    else:
        made = sums0.to(out.dtype.element_ty)
        store_tile(gl.convert_layout(made, stored), out_at, left, column + COLUMN, n, stride_om, stored)
        made = sums1.to(out.dtype.element_ty)
        store_tile(gl.convert_layout(made, stored), out_at, left, column + 128 + COLUMN, n, stride_om, stored)


@gluon.jit
def multiply_tiles(
    out, out_scale, a_bufs, b_bufs, factors, told, full, empty, maxima, known, bias, router, sorted_pairs,
    apart, n, k, stride_bias_e, stride_bias_n, stride_wt, stride_wk, stride_om, stride_out_scale,
    alpha, limit, WHICH: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, TOP_K: gl.constexpr,
    HAS_BIAS: gl.constexpr, ON_INPUT: gl.constexpr, FIRST: gl.constexpr, ACTIVATION: gl.constexpr,
    HALF: gl.constexpr, BY_LINES: gl.constexpr
):  # fmt: skip
    """The warpgroup WHICH of two: the WHICH-th 64 rows of a tile, or of one with up to 64 rows half the columns."""
    WIDTH: gl.constexpr = 128 if FIRST else 256
    step = 0
    shared = 0  # tiles whose rows both warpgroups have
    mbarrier.wait(full.index(0), 0)
    expert, row, left, place = tile_told(told.index(0))
    while expert >= 0:
        column = place * WIDTH
        halves = left <= BM // 2
        if BM == 64:
            halves = left > 0
        if halves:
            multiply_tile(
                out, out_scale, a_bufs, b_bufs, factors, full, empty, maxima, known, bias, router,
                sorted_pairs, expert, row, left, column, step, shared, apart, n, k, stride_bias_e, stride_bias_n,
                stride_wt, stride_wk, stride_om, stride_out_scale, alpha, limit, WHICH, 0, WHICH * 64, 64, STAGES,
                TOP_K, HAS_BIAS, ON_INPUT, FIRST, ACTIVATION, HALF, BY_LINES
            )  # fmt: skip
            shared += 1
        elif BM == 128:
            multiply_tile(
                out, out_scale, a_bufs, b_bufs, factors, full, empty, maxima, known, bias, router,
                sorted_pairs, expert, row + WHICH * 64, left - WHICH * 64, column, step, shared, apart, n, k,
                stride_bias_e, stride_bias_n, stride_wt, stride_wk, stride_om, stride_out_scale, alpha, limit, WHICH,
                WHICH * 64, 0, 128, STAGES, TOP_K, HAS_BIAS, ON_INPUT, FIRST, ACTIVATION, HALF, BY_LINES
            )  # fmt: skip
        step += gl.cdiv(k, 128)
        mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
        expert, row, left, place = tile_told(told.index(step % STAGES))


@gluon.jit
def tile_told(say):
    """Expert, first row, rows that are left, number of the tile of columns."""
    field = gl.arange(0, 4, FOUR)
    say = say.load(FOUR)
    expert = gl.sum(gl.where(field == 0, say, 0), 0)
    row = gl.sum(gl.where(field == 1, say, 0), 0)
    left = gl.sum(gl.where(field == 2, say, 0), 0)
    return expert, row, left, gl.sum(gl.where(field == 3, say, 0), 0)


@gluon.jit(
    do_not_specialize=[
        "across", "apart", "k", "rows_of_b", "stride_am_scale", "stride_ak_scale", "stride_out_scale",
        "stride_bias_e", "stride_bias_n", "stride_wt", "stride_wk", "alpha", "limit",
    ],
    do_not_specialize_on_alignment=[
        "out_scale", "a_scale", "b_scale", "bias", "router", "sorted_pairs", "tile_experts", "tile_rows", "tile_ends",
        "num_tiles", "counter",
    ],
)  # fmt: skip
def experts_kernel(
    a, a_desc, b_desc, out, out_scale, a_scale, b_scale, bias, router, sorted_pairs, tile_experts, tile_rows,
    tile_ends, num_tiles, counter, across, apart, n, k, rows_of_b, stride_am_scale, stride_ak_scale, stride_be_scale,
    stride_bn_scale, stride_bk_scale, stride_bias_e, stride_bias_n, stride_wt, stride_wk, stride_om, stride_out_scale,
    alpha, limit, BM: gl.constexpr, STAGES: gl.constexpr, TOP_K: gl.constexpr, B_E8M0: gl.constexpr,
    HAS_BIAS: gl.constexpr, ON_INPUT: gl.constexpr, FIRST: gl.constexpr, ACTIVATION: gl.constexpr, HALF: gl.constexpr,
    BY_LINES: gl.constexpr
):  # fmt: skip
    """out [rows, n] of rows of float8 and the weights of all experts, of which those of e are from e * rows_of_b on.

    FIRST: row r is that of the token sorted_pairs[r] // TOP_K in `a`, which is `k` up to whole 128 wide; weights are
    gate and, `apart` rows later, up, both of n rows; `out` gets float8, `out_scale` [n / 128, rows] its scales, and
    HALF is what is rounded to before. Otherwise rows are those of `a_desc`, weights have n rows and `apart` is 128.
    ON_INPUT: sums are first multiplied by `router` of the pair. A tile has BM rows from `tile_rows` on, of which those
    before `tile_ends` belong to `tile_experts`. `counter` is of tiles that were handed out, one for each product, and
    0 before.
    """
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BM, 128], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [2 * STAGES, 128, 128], b_desc.layout)
    factors = gl.allocate_shared_memory(gl.float32, [2 * STAGES, BM], VECTOR)
    told = gl.allocate_shared_memory(gl.int32, [STAGES, 4], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    known = full  # neither is used unless it is replaced: see `language.py` for barriers that nothing uses
    maxima = full
    if FIRST:
        known = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
        maxima = gl.allocate_shared_memory(gl.float32, [4, 64], VECTOR)
        for w in gl.static_range(4):
            mbarrier.init(known.index(w), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=130 if FIRST else 2)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    tiles = gl.load(num_tiles)
    gl.warp_specialize(
        [
            (multiply_tiles, (
                out, out_scale, a_bufs, b_bufs, factors, told, full, empty, maxima, known, bias, router,
                sorted_pairs, apart, n, k, stride_bias_e, stride_bias_n, stride_wt, stride_wk, stride_om,
                stride_out_scale, alpha, limit,
                0, BM, STAGES, TOP_K, HAS_BIAS, ON_INPUT, FIRST, ACTIVATION, HALF, BY_LINES
            )),
            (multiply_tiles, (
                out, out_scale, a_bufs, b_bufs, factors, told, full, empty, maxima, known, bias, router,
                sorted_pairs, apart, n, k, stride_bias_e, stride_bias_n, stride_wt, stride_wk, stride_om,
                stride_out_scale, alpha, limit,
                1, BM, STAGES, TOP_K, HAS_BIAS, ON_INPUT, FIRST, ACTIVATION, HALF, BY_LINES
            )),
            (load_tiles, (
                a, a_desc, b_desc, a_bufs, b_bufs, factors, told, full, empty, a_scale, b_scale, sorted_pairs,
                tile_experts, tile_rows, tile_ends, counter, tiles, across, apart, n, k, rows_of_b, stride_am_scale,
                stride_ak_scale, stride_be_scale, stride_bn_scale, stride_bk_scale, TOP_K, BM, STAGES, B_E8M0, FIRST
            )),
        ],
        [4, 4 if FIRST else 1],
        [232, 40],
    )  # fmt: skip
