# mypy: ignore-errors
"""A product of float8 matrices: one tile of the result, over all of K or a part of it, per program.

    for each 128 columns: acc += a_tile . b_tile, times the block's scales where there are such
    acc *= scales of rows, where there are such; + bias; store

Programs go over tiles in groups of rows, so that tiles near in time share operands in L2. With SWAPPED the
product is made as b . aT: few rows then take the short side of the matrix instruction, whose long side must be 64
on sm_90 and sm_10x. Where the tiles are fewer than the device's multiprocessors, K is split; parts are stored
in float32 and added in their order, so the same call gives the same bits: by the program that is the last of its tile,
by a counter, or where there are no counters by `add_parts_kernel`.

Before sm_89 there is no product of float8: bytes become the float16 that is 256 times smaller, exactly, and
2^16 goes into the scale. So they do beside an operand in e5m2, whose bytes are halves of a float16 as they are, and 2^8
goes into the sums. So do weights beside activations of 16 bits (WEIGHT_ONLY), in their dtype. Scales of 32 columns are
multiplied into bfloat16 operands: powers of two, exact, of 256ths of the codes, since 448 x 2^127 is no number of
bfloat16. Of two scales of a block 2^20 is left for the sum (`two_scales.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.formats import e4m3_scaled, e5m2_to_float, e8m0_to_float
from kernelhub.backends.triton.two_scales import LEFT_OF_BOTH, of_both, times_both

_LEFT_OF_BOTH = tl.constexpr(LEFT_OF_BOTH)


@triton.jit
def _scale(at, E8M0: tl.constexpr):
    """Scales as float32."""
    stored = tl.load(at)
    if E8M0:
        return e8m0_to_float(stored)
    else:  # noqa: RET505  a static branch: both would be compiled without it
        return stored


@triton.jit
def _decoded(codes, dtype: tl.constexpr, E5M2: tl.constexpr):
    """Bytes as `dtype`: of e4m3 a 256th, of e5m2 all of it."""
    if E5M2:
        return e5m2_to_float(codes, dtype)
    else:  # noqa: RET505  a static branch, as above
        return e4m3_scaled(codes, dtype, False)


@triton.jit
def mx_values(codes, scales, kept, there, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, E5M2: tl.constexpr):
    """A tile [ROWS, BLOCK_K] of codes, times scales [ROWS, BLOCK_K / 32], as bfloat16: over 2^8, of e5m2 over 2^16."""
    raw = tl.load(codes, kept, other=0)
    if E5M2:
        # In float32: Triton makes constants of bfloat16 by way of float16, which has no 2^-16 without an error of 2^-6.
        values = (e5m2_to_float(raw, tl.float32) * (1.0 / 65536.0)).to(tl.bfloat16)
    else:
        values = _decoded(raw, tl.bfloat16, False)
    factors = e8m0_to_float(tl.load(scales, there, other=127)).to(tl.bfloat16)
    wide = tl.broadcast_to(factors[:, :, None], (ROWS, BLOCK_K // 32, 32))
    return values * tl.reshape(wide, (ROWS, BLOCK_K))


@triton.jit(
    do_not_specialize=["m", "splits", "adds"],
    do_not_specialize_on_alignment=["a_scale", "b_scale", "bias", "counters"],
)
def product_kernel(
    a,
    b,
    out,
    sums,
    counters,
    a_scale,
    b_scale,
    bias,
    m,
    n,
    k,
    splits,
    adds,
    stride_ab,
    stride_am,
    stride_ak,
    stride_bb,
    stride_bn,
    stride_bk,
    stride_ob,
    stride_om,
    stride_on,
    stride_ab_scale,
    stride_am_scale,
    stride_ak_scale,
    stride_bb_scale,
    stride_bn_scale,
    stride_bk_scale,
    stride_bias,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SCALING: tl.constexpr,
    A_E8M0: tl.constexpr,
    B_E8M0: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SWAPPED: tl.constexpr,
    EVEN_K: tl.constexpr,
    PARTS: tl.constexpr,
    NATIVE: tl.constexpr,
    WEIGHT_ONLY: tl.constexpr,
    A_E5M2: tl.constexpr,
    B_E5M2: tl.constexpr,
):
    """BLOCK_K is 128 where SCALING is "block" or "row_block".

    With PARTS parts are stored to `sums` [splits, batch, m, n] in float32, contiguous and without the bias. If `adds`,
    there is a zero for each tile in `counters`, which no other launch uses at the same time, and the last program of a
    tile stores to `out`; else another launch does.
    """
    program = tl.program_id(0)
    m_tiles = tl.cdiv(m, BLOCK_M)
    n_tiles = tl.cdiv(n, BLOCK_N)
    tiles = m_tiles * n_tiles
    split = program % splits
    batch = (program // splits // tiles).to(tl.int64)
    tile = program // splits % tiles
    first = tile // (GROUP_M * n_tiles) * GROUP_M
    rows_of_group = tl.minimum(m_tiles - first, GROUP_M)
    within = tile % (GROUP_M * n_tiles)
    tile_m = first + within % rows_of_group
    tile_n = within // rows_of_group

    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(rows, m - 1).to(tl.int64)
    column = tl.minimum(columns, n - 1).to(tl.int64)
    blocks = tl.cdiv(k, BLOCK_K)
    begin = blocks * split // splits
    end = blocks * (split + 1) // splits
    depth = tl.arange(0, BLOCK_K)
    first_block = begin.to(tl.int64)
    a += batch * stride_ab + first_block * BLOCK_K * stride_ak
    b += batch * stride_bb + first_block * BLOCK_K * stride_bk
    if not WEIGHT_ONLY:
        a_scale += batch * stride_ab_scale
    b_scale += batch * stride_bb_scale
    groups: tl.constexpr = BLOCK_K // 32 if SCALING == "mx" else 1  # scales of a row per step
    if SCALING != "row":
        if not WEIGHT_ONLY:
            a_scale += first_block * groups * stride_ak_scale
        b_scale += first_block * groups * stride_bk_scale

    if SCALING == "mx":
        group = tl.arange(0, groups)
        a_at = a + row[:, None] * stride_am + depth[None, :] * stride_ak
        b_at = b + column[:, None] * stride_bn + depth[None, :] * stride_bk
        a_scale_at = a_scale + row[:, None] * stride_am_scale + group[None, :] * stride_ak_scale
        b_scale_at = b_scale + column[:, None] * stride_bn_scale + group[None, :] * stride_bk_scale
    elif SWAPPED:
        a_at = a + row[None, :] * stride_am + depth[:, None] * stride_ak
        b_at = b + column[:, None] * stride_bn + depth[None, :] * stride_bk
    else:
        a_at = a + row[:, None] * stride_am + depth[None, :] * stride_ak
        b_at = b + column[None, :] * stride_bn + depth[:, None] * stride_bk
    if SWAPPED:
        row, column, rows, columns = row[None, :], column[:, None], rows[None, :], columns[:, None]
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        row, column, rows, columns = row[:, None], column[None, :], rows[:, None], columns[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if SCALING == "block" or SCALING == "row_block":
        if not WEIGHT_ONLY:
            a_scale_at = a_scale + row * stride_am_scale
        if SCALING == "block":
            b_scale_at = b_scale + tile_n * BLOCK_N // 128 * stride_bn_scale
        else:
            b_scale_at = b_scale + column * stride_bn_scale

    # The factors of a step are computed in the step before, so that its sums do not wait for them: 4096 rows with
    # 7168 x 18432 took 1.32 ms on an H200, and 1.47 without. Where K is split that gains nothing.
    # A scale for each row of b as well makes the factors as many as the sums: registers hold them once.
    ahead: tl.constexpr = SCALING == "block" and not (WEIGHT_ONLY or SWAPPED or PARTS)
    if ahead:
        factors = of_both(_scale(a_scale_at, A_E8M0), _scale(b_scale_at, B_E8M0))

    for block in range(begin, end):
        if SCALING == "mx":
            kept = (block * BLOCK_K + depth < k)[None, :]
            there = (block * BLOCK_K + group * 32 < k)[None, :]
            left = mx_values(a_at, a_scale_at, kept, there, BLOCK_M, BLOCK_K, A_E5M2)
            right = mx_values(b_at, b_scale_at, kept, there, BLOCK_N, BLOCK_K, B_E5M2)
            if SWAPPED:
                acc = tl.dot(right, tl.trans(left), acc)
            else:
                acc = tl.dot(left, tl.trans(right), acc)
        else:
            if EVEN_K:
                left = tl.load(a_at)
                right = tl.load(b_at)
            else:
                kept = block * BLOCK_K + depth < k
                if SWAPPED:
                    left = tl.load(a_at, kept[:, None], other=0.0)
                    right = tl.load(b_at, kept[None, :], other=0.0)
                else:
                    left = tl.load(a_at, kept[None, :], other=0.0)
                    right = tl.load(b_at, kept[:, None], other=0.0)
            if WEIGHT_ONLY:
                right = e4m3_scaled(right, a.dtype.element_ty, False)
            elif not NATIVE:
                left = _decoded(left, tl.float16, A_E5M2)
                right = _decoded(right, tl.float16, B_E5M2)
            if SWAPPED:
                left, right = right, left
            if ahead:
                part = tl.dot(left, right)
                more = (block + 1 < end).to(tl.int64)
                of_a = _scale(a_scale_at + more * stride_ak_scale, A_E8M0)
                later = of_both(of_a, _scale(b_scale_at + more * stride_bk_scale, B_E8M0))
                acc += part * factors
                factors = later
            elif SCALING == "block" or SCALING == "row_block":
                factors = _scale(b_scale_at, B_E8M0)
                if not WEIGHT_ONLY:
                    factors = of_both(_scale(a_scale_at, A_E8M0), factors)
                acc += tl.dot(left, right) * factors
            elif NATIVE and not WEIGHT_ONLY:  # what Hopper adds up in 14 bits goes to float32 after each block
                acc = tl.dot(left, right, acc, max_num_imprecise_acc=BLOCK_K)
            else:
                acc = tl.dot(left, right, acc)
        a_at += BLOCK_K * stride_ak
        b_at += BLOCK_K * stride_bk
        if SCALING != "row":
            if not WEIGHT_ONLY:
                a_scale_at += groups * stride_ak_scale
            b_scale_at += groups * stride_bk_scale

    if SCALING == "row":
        of_columns = tl.load(b_scale + column * stride_bn_scale)
        if WEIGHT_ONLY:
            acc *= of_columns
        else:
            acc = times_both(acc, tl.load(a_scale + row * stride_am_scale), of_columns)
    if (SCALING == "block" or SCALING == "row_block") and not WEIGHT_ONLY:
        acc *= _LEFT_OF_BOTH
    if WEIGHT_ONLY:
        acc *= 256.0
    elif A_E5M2 or B_E5M2:
        acc *= 16777216.0 if SCALING == "mx" else 256.0
    elif SCALING == "mx" or not NATIVE:
        acc *= 65536.0
    kept = (rows < m) & (columns < n)
    if PARTS:
        batches = tl.num_programs(0) // splits // tiles
        of_tile = (batch * m + rows.to(tl.int64)) * n + columns.to(tl.int64)
        size = batches.to(tl.int64) * m * n
        tl.store(sums + split * size + of_tile, acc, kept)
        if adds:
            tl.debug_barrier()  # what all threads stored comes before the counter
            counter = counters + batch * tiles + tile
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1:
                tl.store(counter, 0)
                total = tl.load(sums + of_tile, kept, other=0.0)
                for part in range(1, splits):
                    total += tl.load(sums + part * size + of_tile, kept, other=0.0)
                _store(
                    total, out, bias, batch, rows, columns, n, kept, stride_ob, stride_om, stride_on, stride_bias,
                    HAS_BIAS,
                )  # fmt: skip
    else:
        _store(acc, out, bias, batch, rows, columns, n, kept, stride_ob, stride_om, stride_on, stride_bias, HAS_BIAS)


@triton.jit
def _store(
    total, out, bias, batch, rows, columns, n, kept, stride_ob, stride_om, stride_on, stride_bias,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias + columns * stride_bias, columns < n, other=0.0).to(tl.float32)
    # Not the clamped ones, which are not known to be adjacent: each element would be stored by itself.
    at = batch * stride_ob + rows.to(tl.int64) * stride_om + columns.to(tl.int64) * stride_on
    tl.store(out + at, total.to(out.dtype.element_ty), kept)


@triton.jit(do_not_specialize=["m", "splits"], do_not_specialize_on_alignment=["bias"])
def add_parts_kernel(
    parts,
    out,
    bias,
    m,
    n,
    splits,
    stride_om,
    stride_on,
    stride_bias,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Parts [splits, m, n] added in their order; a row's blocks of BLOCK columns are programs."""
    program = tl.program_id(0)
    wide = tl.cdiv(n, BLOCK)
    row = (program // wide).to(tl.int64)
    column = program % wide * BLOCK + tl.arange(0, BLOCK)
    kept = column < n
    at = row * n + column
    total = tl.load(parts + at, kept, other=0.0)
    for _ in range(1, splits):
        at += m.to(tl.int64) * n
        total += tl.load(parts + at, kept, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + column * stride_bias, kept, other=0.0).to(tl.float32)
    tl.store(out + row * stride_om + column * stride_on, total.to(out.dtype.element_ty), kept)
