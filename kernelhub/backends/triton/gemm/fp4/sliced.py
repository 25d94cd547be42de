# mypy: ignore-errors
"""Few rows times a float4 weight, whole columns of the result by one program each, whose warps share K.

Nothing goes through global memory but the result: no planes of the activations, no parts of a split K. Each warp
multiplies its pieces of K by `mma` (a batch of products, one for each warp), and sums of warps are added at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.fp4 import words_at
from kernelhub.backends.triton.gemm.fp4.gemm import finished
from kernelhub.backends.triton.gemm.fp4.pieces import (
    factors_in_order,
    in_order,
    piece_factor,
    piece_quads,
    planes_in_order,
)


@triton.jit(
    do_not_specialize=["M", "N", "K"],
    do_not_specialize_on_alignment=["b_global", "bias"],
)
def sliced_kernel(
    a,
    b,
    b_scale,
    b_global,
    bias,
    out,
    M,
    N,
    K,
    stride_am,
    stride_ak,
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
    SLICES: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """TILE_N is 0 for a weight as in a checkpoint. WIDE: b are words of 16 bits, `stride_bn` is in units of 16 bytes.

    SLICES is the number of warps, PIECES that of pieces of 128 elements that each takes in a step. WHOLE: K is a
    multiple of all of them. BLOCK_M are all rows.
    """
    DTYPE: tl.constexpr = tl.float16 if A_FORMAT == "float16" else tl.bfloat16
    GROUP: tl.constexpr = 32 if B_FORMAT == "mxfp4" else 16
    GROUPS: tl.constexpr = 128 // GROUP
    STEP: tl.constexpr = SLICES * PIECES
    tiles = tl.cdiv(K, 128)
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    m = tl.arange(0, BLOCK_M).to(tl.int64)
    n_there, m_there = n < N, m < M
    piece = (tl.arange(0, SLICES) * PIECES)[:, None, None]
    word = tl.arange(0, PIECES * 32)[None, None, :]
    group = tl.arange(0, PIECES * GROUPS)[None, None, :]
    column = tl.arange(0, PIECES * 128)[None, None, :]
    of_word = 1 if WIDE else 2 * stride_bk
    if TILE_N:
        line = (n // TILE_N * (tiles * TILE_N) + n % TILE_N)[None, :, None]
        w_at = b + (line * 32 + (piece + word // 32) * (TILE_N * 32) + word % 32) * of_word
        s_at = b_scale + line * GROUPS + (piece + group // GROUPS) * (TILE_N * GROUPS) + group % GROUPS
        words_apart = STEP * TILE_N * 32 * of_word
        groups_apart = STEP * TILE_N * GROUPS
    else:
        w_at = b + n[None, :, None] * (stride_bn * 8 if WIDE else stride_bn) + (piece * 32 + word) * of_word
        s_at = b_scale + n[None, :, None] * stride_tn + (piece * GROUPS + group) * stride_tk
        words_apart = STEP * 32 * of_word
        groups_apart = STEP * GROUPS * stride_tk
    x_at = a + m[None, :, None] * stride_am + (piece * 128 + column) * stride_ak
    acc = tl.zeros((SLICES, BLOCK_N, BLOCK_M), tl.float32)
    w_mask, x_mask = n_there[None, :, None], m_there[None, :, None]
    steps = K // (STEP * 128)
    for step in range(steps):
        acc = _plus_step(
            acc, w_at + step * words_apart, s_at + step * groups_apart, x_at + step * (STEP * 128) * stride_ak, w_mask,
            w_mask, x_mask, stride_bk, WIDE, B_FORMAT, DTYPE, NATIVE, PTX, SLICES, PIECES, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    if not WHOLE:
        first = steps * STEP + piece
        groups = K // GROUP
        acc = _plus_step(
            acc, w_at + steps * words_apart, s_at + steps * groups_apart, x_at + steps * (STEP * 128) * stride_ak,
            w_mask & (first * 32 + word < groups * (GROUP // 4)), w_mask & (first * GROUPS + group < groups),
            x_mask & (first * 128 + column < groups * GROUP), stride_bk, WIDE, B_FORMAT, DTYPE, NATIVE, PTX, SLICES,
            PIECES, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    total = tl.trans(tl.sum(acc, 0))
    total = finished(total, m, n, m_there, n_there, None, None, b_global, bias, 0, A_FORMAT, B_FORMAT, HAS_BIAS, LEFT)
    mask = m_there[:, None] & n_there[None, :]
    tl.store(out + m[:, None] * stride_om + n[None, :] * stride_on, total.to(out.dtype.element_ty), mask)


@triton.jit
def _plus_step(
    acc, w_at, s_at, x_at, w_mask, s_mask, x_mask, stride_bk, WIDE: tl.constexpr, FORMAT: tl.constexpr,
    DTYPE: tl.constexpr, NATIVE: tl.constexpr, PTX: tl.constexpr, SLICES: tl.constexpr, PIECES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """acc [SLICES, BLOCK_N, BLOCK_M] plus the products of some pieces."""
    words = words_at(w_at, w_mask, w_mask, stride_bk, WIDE)
    raw = tl.load(s_at, s_mask, other=0)
    x = tl.load(x_at, x_mask, other=0.0)
    words = in_order(words, SLICES, BLOCK_N, PIECES)
    factor = factors_in_order(piece_factor(raw, FORMAT, DTYPE, NATIVE, PTX), FORMAT, SLICES, BLOCK_N, PIECES)
    w0, w1, w2, w3 = piece_quads(words, factor, FORMAT, DTYPE, PTX)
    x0, x1, x2, x3 = planes_in_order(x, SLICES, BLOCK_M, PIECES)
    acc = tl.dot(w0, tl.permute(x0, (0, 2, 1)), acc, input_precision="ieee")
    acc = tl.dot(w1, tl.permute(x1, (0, 2, 1)), acc, input_precision="ieee")
    acc = tl.dot(w2, tl.permute(x2, (0, 2, 1)), acc, input_precision="ieee")
    return tl.dot(w3, tl.permute(x3, (0, 2, 1)), acc, input_precision="ieee")
