# mypy: ignore-errors
"""Activations in fp8: codes, and a scale of each row or of each 1 x 128 of it, unless it is known beforehand.

scale = max(|x|, 1e-10) / 448;  code = e4m3(x / scale)
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.formats import E4M3_MAX, float_to_e4m3

SMALLEST_AMAX = tl.constexpr(1e-10)


@triton.jit
def quantize_pieces(
    program, x, given, codes, scales, rows, stride_xm, stride_xk, K: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr, STATIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What the program of this number does of BLOCK pieces of WIDTH columns.

    Divisions round to nearest: Triton's `/` is two units off on a GPU. Values of bfloat16 over a scale that is a power
    of two lie half way between two codes one time in 16, and all of them went the same wrong way: up to 1.3 times the
    error that is allowed, on an H200.
    """
    pieces: tl.constexpr = (K + WIDTH - 1) // WIDTH
    piece = (program * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    row = piece // pieces
    column = (piece % pieces * WIDTH)[:, None] + tl.arange(0, WIDTH_PAD)[None, :]
    inside = (tl.arange(0, WIDTH_PAD) < WIDTH)[None, :]
    mask = (row < rows)[:, None] & (column < K) & inside
    values = tl.load(x + row[:, None] * stride_xm + column * stride_xk, mask, other=0.0).to(tl.float32)
    if STATIC:
        scale = tl.load(given) + tl.zeros((BLOCK,), dtype=tl.float32)
    else:
        scale = scale_of(values)
        tl.store(scales + piece, scale, row < rows)
    quotient = tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape))
    tl.store(codes + row[:, None] * K + column, float_to_e4m3(quotient), mask)


@triton.jit
def scale_of(values):
    """The scale of each row of float32."""
    largest = tl.max(tl.abs(values), 1)
    return tl.div_rn(tl.where(largest > SMALLEST_AMAX, largest, SMALLEST_AMAX), E4M3_MAX)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["given"])
def quantize_kernel(
    x,
    given,
    codes,
    scales,
    rows,
    stride_xm,
    stride_xk,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    STATIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`codes` [rows, K] and `scales` [rows, pieces of a row] are contiguous."""
    quantize_pieces(
        tl.program_id(0), x, given, codes, scales, rows, stride_xm, stride_xk, K, WIDTH, WIDTH_PAD, STATIC, BLOCK
    )
