# mypy: ignore-errors
"""Activations times a float4 weight, which is decoded in registers.

    for each BLOCK_K of K:  w = decode(nibbles) * scale of the group, exact in bfloat16 (nvfp4: in float16 too)
                            acc += a w^T, in float32
    out = acc * scale of the row * global scales * LEFT + bias

Of elements in mxfp4 and mxfp8 a power of two is left for the end: the largest, 6 or 448 x 2^127, are no numbers of
bfloat16 or float32, and infinity times 0, or minus infinity, would be NaN.

Where a is bfloat16 or float16 it comes as planes, and four products of a quarter of BLOCK_K each take the weight's
codes in their memory order (QUADS; `backends/triton/fp4.py`). Otherwise both operands are decoded and interleaved.

float16 does not hold the powers of two of mxfp4. There BLOCK_K is one group, and its scale multiplies the product.

With few rows of a (SWAP) the tile is that of the weight times that of a, so that the weight's rows fill the 64 rows
of a matrix instruction; K is then split among programs. The last of a tile, found by a counter, adds up the parts,
always in one order; where there are no counters another kernel does.

A packed weight is stored in tiles of TILE_N rows x TILE_K elements, codes and scales: a program reads at once what in
a checkpoint are pieces of 64 and of 8 bytes, K / 2 and K / 16 bytes apart.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.formats import e4m3_to_float, e8m0_to_float
from kernelhub.backends.triton.fp4 import product
from kernelhub.backends.triton.two_scales import times_both

# Strides stay specialised: whether they are divisible by 16 decides how much is moved at once.
_VARYING = ["M", "adds", "row_step"]
_ANYWHERE = ["a_scale", "a_global", "b_global", "bias", "counters"]


@triton.jit
def e2m1_values(code):
    """The lower four bits of bytes as float32: the bits as those of a float16 are the value / 2^14, subnormals too."""
    wide = code.to(tl.uint16)
    half = ((wide & 8) << 12) | ((wide & 7) << 9)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def scale_values(raw, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Bytes of scales as float32, over `LEFT_OF_MX`."""
    if FORMAT == "nvfp4":
        return e4m3_to_float(raw, tl.float32, NATIVE)
    return e8m0_to_float(raw) * (0.00390625 if FORMAT == "mxfp8" else 0.125)


@triton.jit
def times_groups(value, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """[ROWS, COLUMNS] times [ROWS, COLUMNS / GROUP]."""
    GROUPS: tl.constexpr = COLUMNS // GROUP
    product = tl.reshape(value, [ROWS, GROUPS, GROUP]) * scale[:, :, None]
    return tl.reshape(product, [ROWS, COLUMNS])


@triton.jit
def fp4_tile(raw, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Bytes [ROWS, COLUMNS / 2] as float32 [ROWS, COLUMNS]."""
    return tl.reshape(tl.join(e2m1_values(raw), e2m1_values(raw >> 4)), [ROWS, COLUMNS])


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def gemm_kernel(
    a,
    a_scale,
    a_global,
    b,
    b_scale,
    b_global,
    bias,
    out,
    sums,
    counters,
    M,
    adds,
    row_step,
    stride_am,
    stride_ak,
    stride_sm,
    stride_sk,
    stride_bn,
    stride_bk,
    stride_tn,
    stride_tk,
    stride_om,
    stride_on,
    N: tl.constexpr,
    K: tl.constexpr,
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
    A_GROUP: tl.constexpr,
    B_GROUP: tl.constexpr,
    SCALE_AFTER: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SWAP: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    NATIVE: tl.constexpr,
    QUADS: tl.constexpr,
    PTX: tl.constexpr,
    WIDE: tl.constexpr,
    LEFT: tl.constexpr,
):
    """Strides s are those of the scales of a's groups, t those of b's; `row_step` leads to the next row's scale.

    TILE_N is 0 for a weight as in a checkpoint. PTX and WIDE are as in `backends/triton/fp4.py`, LEFT is what decoding
    either operand left out.

    With SPLITS > 1 each part's product is stored to `sums`, float32 [SPLITS, M, N]. If `adds`, there is a zero for each
    tile in `counters`, which no other launch uses at the same time, and the last program of a tile stores to `out`;
    else another launch does.
    """
    across, down = tl.cdiv(N, BLOCK_N), tl.cdiv(M, BLOCK_M)
    program = tl.program_id(0)
    part = program % SPLITS
    program = program // SPLITS
    of_tile = program
    # GROUP_M tiles of rows go together, so that those that run at once share weights and rows in the cache.
    together = GROUP_M * across
    first = program // together * GROUP_M
    high = tl.minimum(down - first, GROUP_M)
    m = ((first + program % together % high) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n_tile = program % together // high
    n = (n_tile * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    m_there, n_there = m < M, n < N

    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    STEPS_PER_PART: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    DTYPE: tl.constexpr = tl.float16 if A_FORMAT == "float16" else tl.bfloat16
    A_FP4: tl.constexpr = A_FORMAT == "nvfp4" or A_FORMAT == "mxfp4"
    WHOLE: tl.constexpr = K % BLOCK_K == 0
    first_step = part * STEPS_PER_PART
    if QUADS:
        last_step = tl.minimum(first_step + STEPS_PER_PART, STEPS)
        TILES_K: tl.constexpr = (K + TILE_K - 1) // TILE_K if TILE_N else 1
        if TILE_N:
            line = (n // TILE_N * (TILES_K * TILE_N) + n % TILE_N)[:, None]
            w_at = b + line * (TILE_K // 4 if WIDE else TILE_K // 2)
            s_at = b_scale + line * (TILE_K // B_GROUP)
        else:
            w_at = b + n[:, None] * stride_bn * (8 if WIDE else 1)
            s_at = b_scale + n[:, None] * stride_tn
        STEPS_PER_TILE: tl.constexpr = TILE_K // BLOCK_K if TILE_N else 1
        WORDS_APART: tl.constexpr = TILE_N * TILE_K // 4 if TILE_N else BLOCK_K // 4
        GROUPS_APART: tl.constexpr = TILE_N * TILE_K // B_GROUP if TILE_N else BLOCK_K // B_GROUP
        acc = product(
            a + m[:, None] * stride_am, m_there[:, None], w_at, s_at, n_there[:, None], stride_bk, stride_tk,
            first_step, last_step, K, WORDS_APART, GROUPS_APART, STEPS_PER_TILE, B_FORMAT, DTYPE, NATIVE, PTX, WIDE,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)

        for step in range(first_step, tl.minimum(first_step + STEPS_PER_PART, STEPS)):
            k = step * BLOCK_K
            half = tl.arange(0, BLOCK_K // 2)
            group = tl.arange(0, BLOCK_K // B_GROUP)
            if TILE_N:
                SUB: tl.constexpr = TILE_K // BLOCK_K
                tile = (n // TILE_N) * ((K + TILE_K - 1) // TILE_K) + step // SUB
                line = tile * TILE_N + n % TILE_N
                at = line[:, None] * (TILE_K // 2) + (step % SUB) * (BLOCK_K // 2) + half[None, :]
                # Rows up to a multiple of TILE_N are there; a tile may reach beyond.
                raw = tl.load(b + at, n_there[:, None], other=0)
                at = line[:, None] * (TILE_K // B_GROUP) + (step % SUB) * (BLOCK_K // B_GROUP) + group[None, :]
                raw_scale = tl.load(b_scale + at, n_there[:, None], other=0)
            else:
                byte = step * (BLOCK_K // 2) + half
                mask = n_there[:, None] if WHOLE else n_there[:, None] & (byte < K // 2)[None, :]
                raw = tl.load(b + n[:, None] * stride_bn + byte[None, :] * stride_bk, mask, other=0)
                at = step * (BLOCK_K // B_GROUP) + group
                mask = n_there[:, None] if WHOLE else n_there[:, None] & (at < K // B_GROUP)[None, :]
                raw_scale = tl.load(b_scale + n[:, None] * stride_tn + at[None, :] * stride_tk, mask, other=0)
            w = fp4_tile(raw, BLOCK_N, BLOCK_K)
            w_scale = scale_values(raw_scale, B_FORMAT, NATIVE)
            if not SCALE_AFTER:
                w = times_groups(w, w_scale, BLOCK_N, BLOCK_K, B_GROUP)
            w = w.to(DTYPE)

            if A_FP4:
                byte = step * (BLOCK_K // 2) + half
                mask = m_there[:, None] if WHOLE else m_there[:, None] & (byte < K // 2)[None, :]
                x = tl.load(a + m[:, None] * stride_am + byte[None, :] * stride_ak, mask, other=0)
                x = fp4_tile(x, BLOCK_M, BLOCK_K)
            else:
                column = k + tl.arange(0, BLOCK_K)
                mask = m_there[:, None] if WHOLE else m_there[:, None] & (column < K)[None, :]
                x = tl.load(a + m[:, None] * stride_am + column[None, :] * stride_ak, mask, other=0)
                if A_FORMAT == "fp8":
                    x = e4m3_to_float(x, DTYPE, NATIVE)
                elif A_FORMAT == "mxfp8":
                    x = e4m3_to_float(x, tl.float32, NATIVE)
            if A_GROUP:
                at = step * (BLOCK_K // A_GROUP) + tl.arange(0, BLOCK_K // A_GROUP)
                mask = m_there[:, None] if WHOLE else m_there[:, None] & (at < K // A_GROUP)[None, :]
                x_scale = tl.load(a_scale + m[:, None] * stride_sm + at[None, :] * stride_sk, mask, other=0)
                x = times_groups(x, scale_values(x_scale, A_FORMAT, NATIVE), BLOCK_M, BLOCK_K, A_GROUP)
            x = x.to(DTYPE)

            if SCALE_AFTER:
                factor = tl.reshape(w_scale, [BLOCK_N])
                if SWAP:
                    acc += tl.dot(w, tl.trans(x)) * factor[:, None]
                else:
                    acc += tl.dot(x, tl.trans(w)) * factor[None, :]
            elif SWAP:
                acc = tl.dot(w, tl.trans(x), acc)
            else:
                acc = tl.dot(x, tl.trans(w), acc)

    if SWAP:
        acc = tl.trans(acc)
    mask = m_there[:, None] & n_there[None, :]
    if SPLITS > 1:
        at = (part.to(tl.int64) * M + m[:, None]) * N + n[None, :]
        tl.store(sums + at, acc, mask)
        if adds:
            tl.debug_barrier()  # what all threads stored comes before the counter
            if tl.atomic_add(counters + of_tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
                tl.store(counters + of_tile, 0)
                total = sum_of_parts(sums, m, n, M, N, mask, SPLITS, BLOCK_M, BLOCK_N)
                total = finished(
                    total, m, n, m_there, n_there, a_scale, a_global, b_global, bias, row_step, A_FORMAT, B_FORMAT,
                    HAS_BIAS, LEFT,
                )  # fmt: skip
                tl.store(out + m[:, None] * stride_om + n[None, :] * stride_on, total.to(out.dtype.element_ty), mask)
    else:
        acc = finished(
            acc, m, n, m_there, n_there, a_scale, a_global, b_global, bias, row_step, A_FORMAT, B_FORMAT, HAS_BIAS, LEFT
        )
        tl.store(out + m[:, None] * stride_om + n[None, :] * stride_on, acc.to(out.dtype.element_ty), mask)


@triton.jit
def sum_of_parts(
    sums, m, n, M, N, mask, SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """The parts of K, first to last."""
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for part in range(SPLITS):
        acc += tl.load(sums + (part * M + m[:, None]) * N + n[None, :], mask, other=0.0)
    return acc


@triton.jit
def finished(
    acc,
    m,
    n,
    m_there,
    n_there,
    a_scale,
    a_global,
    b_global,
    bias,
    row_step,
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LEFT: tl.constexpr,
):
    """What follows the product, or the sum of its parts: one part may be beyond float32 where all together are not."""
    of_a = 1.0
    if A_FORMAT == "nvfp4":
        of_a = tl.load(a_global)
    elif A_FORMAT == "fp8":
        of_a = tl.load(a_scale + m * row_step, m_there, other=0.0)[:, None]
    if B_FORMAT == "nvfp4":
        acc = times_both(acc, of_a, tl.load(b_global))
    else:
        acc *= of_a
    if LEFT != 1.0:
        acc *= LEFT
    if HAS_BIAS:
        acc += tl.load(bias + n, n_there, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def sum_kernel(
    parts,
    a_scale,
    a_global,
    b_global,
    bias,
    out,
    M,
    row_step,
    stride_om,
    stride_on,
    N: tl.constexpr,
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    LEFT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A stretch of a row."""
    across = tl.cdiv(N, BLOCK_N)
    m = (tl.program_id(0) // across + tl.arange(0, 1)).to(tl.int64)
    n = (tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    m_there, n_there = m < M, n < N
    mask = m_there[:, None] & n_there[None, :]
    acc = sum_of_parts(parts, m, n, M, N, mask, SPLITS, 1, BLOCK_N)
    acc = finished(
        acc, m, n, m_there, n_there, a_scale, a_global, b_global, bias, row_step, A_FORMAT, B_FORMAT, HAS_BIAS, LEFT
    )
    tl.store(out + m[:, None] * stride_om + n[None, :] * stride_on, acc.to(out.dtype.element_ty), mask)
