# mypy: ignore-errors
"""Up to 64 rows times a float4 weight, K split among programs: Hopper's `wgmma` with decoded pieces from registers.

The activations come as planes in the order of the pieces (`piece_planes_kernel`). The last program of a tile, found by
a counter, adds up the parts, always in one order, or another kernel does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.fp4 import plus_quads, words_at
from kernelhub.backends.triton.gemm.fp4.gemm import finished
from kernelhub.backends.triton.gemm.fp4.pieces import factors_in_order, in_order, piece_factor, piece_quads


@triton.jit(
    do_not_specialize=["M", "N", "K", "adds", "splits"],
    do_not_specialize_on_alignment=["b_global", "bias", "counters"],
)
def parts_kernel(
    a,
    b,
    b_scale,
    b_global,
    bias,
    out,
    sums,
    counters,
    M,
    N,
    K,
    splits,
    adds,
    stride_bn,
    stride_bk,
    stride_tn,
    stride_tk,
    stride_om,
    stride_on,
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
    TILE_N: tl.constexpr,
    WIDE: tl.constexpr,
    WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NATIVE: tl.constexpr,
    PTX: tl.constexpr,
    LEFT: tl.constexpr,
    SPLIT: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """a are the planes of pieces [M, K up to a multiple of 128]; b, TILE_N, WIDE and WHOLE are as of `sliced_kernel`.

    BLOCK_M are all rows. With SPLIT each of `splits` parts is stored to `sums`, float32 [splits, M, N]. If `adds`,
    there is a zero for each tile in `counters`, which no other launch uses at the same time.
    """
    DTYPE: tl.constexpr = tl.float16 if A_FORMAT == "float16" else tl.bfloat16
    GROUP: tl.constexpr = 32 if B_FORMAT == "mxfp4" else 16
    GROUPS: tl.constexpr = 128 // GROUP
    tiles = tl.cdiv(K, 128)
    steps = K // (PIECES * 128)
    part = 0
    of_tile = tl.program_id(0)
    first_step = 0
    last_step = steps
    if SPLIT:
        part = of_tile % splits
        of_tile = of_tile // splits
        each = tl.cdiv(steps, splits)
        first_step = part * each
        last_step = tl.minimum(first_step + each, steps)
    n = (of_tile * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    m = tl.arange(0, BLOCK_M).to(tl.int64)
    n_there, m_there = n < N, m < M
    word = tl.arange(0, PIECES * 32)[None, :]
    group = tl.arange(0, PIECES * GROUPS)[None, :]
    of_word = 1 if WIDE else 2 * stride_bk
    if TILE_N:
        line = (n // TILE_N * (tiles * TILE_N) + n % TILE_N)[:, None]
        w_at = b + (line * 32 + word // 32 * (TILE_N * 32) + word % 32) * of_word
        s_at = b_scale + line * GROUPS + group // GROUPS * (TILE_N * GROUPS) + group % GROUPS
        words_apart = PIECES * TILE_N * 32 * of_word
        groups_apart = PIECES * TILE_N * GROUPS
    else:
        w_at = b + n[:, None] * (stride_bn * 8 if WIDE else stride_bn) + word * of_word
        s_at = b_scale + n[:, None] * stride_tn + group * stride_tk
        words_apart = PIECES * 32 * of_word
        groups_apart = PIECES * GROUPS * stride_tk
    x_at = a + m[:, None] * (tiles * 128)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    w_mask, x_mask = n_there[:, None], m_there[:, None]
    for step in range(first_step, last_step):
        acc = _plus_step(
            acc, w_at + step * words_apart, s_at + step * groups_apart, x_at + step * (PIECES * 128), w_mask,
            w_mask, x_mask, PIECES * 128, stride_bk, WIDE, B_FORMAT, DTYPE, NATIVE, PTX, PIECES, BLOCK_N,
        )  # fmt: skip
    if not WHOLE:  # noqa: SIM102 - a constant and a tensor
        if last_step == steps:
            groups = K // GROUP
            acc = _plus_step(
                acc, w_at + steps * words_apart, s_at + steps * groups_apart, x_at + steps * (PIECES * 128),
                w_mask & (steps * (PIECES * 32) + word < groups * (GROUP // 4)),
                w_mask & (steps * (PIECES * GROUPS) + group < groups), x_mask, (tiles - steps * PIECES) * 128,
                stride_bk, WIDE, B_FORMAT, DTYPE, NATIVE, PTX, PIECES, BLOCK_N,
            )  # fmt: skip
    acc = tl.trans(acc)
    mask = m_there[:, None] & n_there[None, :]
    o_at = out + m[:, None] * stride_om + n[None, :] * stride_on
    if SPLIT:
        at = (part.to(tl.int64) * M + m[:, None]) * N + n[None, :]
        tl.store(sums + at, acc, mask)
        if adds:
            tl.debug_barrier()  # what all threads stored comes before the counter
            if tl.atomic_add(counters + of_tile, 1, sem="acq_rel", scope="gpu") == splits - 1:
                tl.store(counters + of_tile, 0)
                total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                for one in range(splits):
                    total += tl.load(sums + (one * M + m[:, None]) * N + n[None, :], mask, other=0.0)
                total = finished(
                    total, m, n, m_there, n_there, None, None, b_global, bias, 0, A_FORMAT, B_FORMAT, HAS_BIAS, LEFT
                )
                tl.store(o_at, total.to(out.dtype.element_ty), mask)
    else:
        acc = finished(acc, m, n, m_there, n_there, None, None, b_global, bias, 0, A_FORMAT, B_FORMAT, HAS_BIAS, LEFT)
        tl.store(o_at, acc.to(out.dtype.element_ty), mask)


@triton.jit
def _plus_step(
    acc, w_at, s_at, x_at, w_mask, s_mask, x_mask, there, stride_bk, WIDE: tl.constexpr,
    FORMAT: tl.constexpr, DTYPE: tl.constexpr, NATIVE: tl.constexpr, PTX: tl.constexpr, PIECES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, BLOCK_M] plus the products of some pieces."""
    words = words_at(w_at, w_mask, w_mask, stride_bk, WIDE)
    raw = tl.load(s_at, s_mask, other=0)
    words = tl.reshape(in_order(words, 1, BLOCK_N, PIECES), (BLOCK_N, PIECES * 32))
    factor = factors_in_order(piece_factor(raw, FORMAT, DTYPE, NATIVE, PTX), FORMAT, 1, BLOCK_N, PIECES)
    factor = tl.reshape(factor, (BLOCK_N, PIECES * 32))
    w0, w1, w2, w3 = piece_quads(words, factor, FORMAT, DTYPE, PTX)
    word = tl.arange(0, PIECES * 32)[None, :]
    column = word // 32 * 128 + word % 32
    x_mask = x_mask & (column < there)
    x0 = tl.load(x_at + column, x_mask, other=0.0)
    x1 = tl.load(x_at + column + 32, x_mask, other=0.0)
    x2 = tl.load(x_at + column + 64, x_mask, other=0.0)
    x3 = tl.load(x_at + column + 96, x_mask, other=0.0)
    return plus_quads(acc, w0, w1, w2, w3, x0, x1, x2, x3)
