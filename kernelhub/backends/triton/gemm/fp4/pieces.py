# mypy: ignore-errors
"""Pieces of 128 elements of a float4 row, of which each thread decodes 32 contiguous ones.

Sums over K may be taken in any order, as long as both operands have the same. Four threads share a piece: each reads 16
bytes at once, whole groups of mxfp4, so that it needs one scale for 32 elements, of nvfp4 two. A piece is eight words
of 16 bits for each of four threads c, whose number has the bits g, h and b; the matrix instruction takes b next to each
other, then the threads, then h: words go from the order (c, g, h, b) to (g, h, c, b), which moves nothing.

As in `backends/triton/fp4.py` the elements 4 j + i of a row are the tile i of four. Here two of them take six
instructions of two words: signs are put 6 bits higher, beside the codes of the two, so that one mask takes both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.fp4 import group_factor, quads


@triton.jit
def _bfloat16_quads(words, factor):
    """Codes times 2^-126 times a factor."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 q, a, b;
        shl.b32 a, $4, 6; lop3.b32 a, a, $4, 0x22002200, 0xE4;
        shl.b32 b, a, 6; and.b32 b, b, 0x81C081C0; mul.rn.bf16x2 $0, b, $5;
        shl.b32 b, a, 2; and.b32 b, b, 0x81C081C0; mul.rn.bf16x2 $1, b, $5;
        shr.u32 q, $4, 8;
        shl.b32 a, q, 6; lop3.b32 a, a, q, 0x22002200, 0xE4;
        shl.b32 b, a, 6; and.b32 b, b, 0x81C081C0; mul.rn.bf16x2 $2, b, $5;
        shl.b32 b, a, 2; and.b32 b, b, 0x81C081C0; mul.rn.bf16x2 $3, b, $5;
        }""",
        "=&r,=&r,=&r,=&r,r,r",
        [words, factor],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _bfloat16_eighths(words, factor):
    """Codes over 8 times a factor, in two products: no number of bfloat16 is 2^126 times a scale of 2^127."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 q, a, b, up;
        mov.b32 up, 0x7D007D00;
        shl.b32 a, $4, 6; lop3.b32 a, a, $4, 0x22002200, 0xE4;
        shl.b32 b, a, 6; and.b32 b, b, 0x81C081C0; mul.rn.bf16x2 b, b, up; mul.rn.bf16x2 $0, b, $5;
        shl.b32 b, a, 2; and.b32 b, b, 0x81C081C0; mul.rn.bf16x2 b, b, up; mul.rn.bf16x2 $1, b, $5;
        shr.u32 q, $4, 8;
        shl.b32 a, q, 6; lop3.b32 a, a, q, 0x22002200, 0xE4;
        shl.b32 b, a, 6; and.b32 b, b, 0x81C081C0; mul.rn.bf16x2 b, b, up; mul.rn.bf16x2 $2, b, $5;
        shl.b32 b, a, 2; and.b32 b, b, 0x81C081C0; mul.rn.bf16x2 b, b, up; mul.rn.bf16x2 $3, b, $5;
        }""",
        "=&r,=&r,=&r,=&r,r,r",
        [words, factor],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _float16_quads(words, factor):
    """Codes times 2^-14 times a factor."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 q, a, b;
        shl.b32 a, $4, 3; lop3.b32 a, a, $4, 0x40404040, 0xE4;
        shl.b32 b, a, 9; and.b32 b, b, 0x8E008E00; mul.rn.f16x2 $0, b, $5;
        shl.b32 b, a, 1; and.b32 b, b, 0x8E008E00; mul.rn.f16x2 $2, b, $5;
        shr.u32 q, $4, 4;
        shl.b32 a, q, 3; lop3.b32 a, a, q, 0x40404040, 0xE4;
        shl.b32 b, a, 9; and.b32 b, b, 0x8E008E00; mul.rn.f16x2 $1, b, $5;
        shl.b32 b, a, 1; and.b32 b, b, 0x8E008E00; mul.rn.f16x2 $3, b, $5;
        }""",
        "=&r,=&r,=&r,=&r,r,r",
        [words, factor],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def piece_factor(raw, FORMAT: tl.constexpr, DTYPE: tl.constexpr, NATIVE: tl.constexpr, PTX: tl.constexpr):
    """Scales as they are held, as `piece_quads` multiplies by them."""
    if PTX and FORMAT == "mxfp4":
        # 2^(raw - 127) is the exponent of a bfloat16; 0 and 255 have one more bit, for 2^-127 and NaN.
        held = raw.to(tl.int16)
        bits = (held << 7) | tl.where(((held + 1) & 0xFE) == 0, 0x40, 0).to(tl.int16)
        factor = bits.to(tl.bfloat16, bitcast=True)
    else:
        factor = group_factor(raw, FORMAT, DTYPE, NATIVE, PTX)
    return factor


@triton.jit
def piece_quads(words, factor, FORMAT: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Words times their factors: four tensors of DTYPE, values over `left_of`."""
    if PTX:
        if FORMAT == "mxfp4":
            w0, w1, w2, w3 = _bfloat16_eighths(words, factor)
        elif tl.bfloat16 == DTYPE:
            w0, w1, w2, w3 = _bfloat16_quads(words, factor)
        else:
            w0, w1, w2, w3 = _float16_quads(words, factor)
    else:
        w0, w1, w2, w3 = quads(words, factor, FORMAT, DTYPE, PTX)
    return w0, w1, w2, w3


@triton.jit
def in_order(words, OUTER: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr):
    """Words [OUTER, ROWS, PIECES * 32] in the order in which they are multiplied."""
    words = tl.permute(tl.reshape(words, (OUTER, ROWS, PIECES, 4, 2, 2, 2)), (0, 1, 2, 4, 5, 3, 6))
    return tl.reshape(words, (OUTER, ROWS, PIECES * 32))


@triton.jit
def factors_in_order(factor, FORMAT: tl.constexpr, OUTER: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr):
    """The factors of groups, for each word in that order."""
    if FORMAT == "mxfp4":
        factor = tl.reshape(factor, (OUTER, ROWS, PIECES, 1, 1, 4, 1))
    else:
        factor = tl.permute(tl.reshape(factor, (OUTER, ROWS, PIECES, 4, 2)), (0, 1, 2, 4, 3))
        factor = tl.reshape(factor, (OUTER, ROWS, PIECES, 2, 1, 4, 1))
    factor = tl.broadcast_to(factor, (OUTER, ROWS, PIECES, 2, 2, 4, 2))
    return tl.reshape(factor, (OUTER, ROWS, PIECES * 32))


@triton.jit
def planes_in_order(x, OUTER: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr):
    """Columns [OUTER, ROWS, PIECES * 128] as four planes in that order."""
    x = tl.reshape(x, (OUTER, ROWS, PIECES, 4, 2, 2, 2, 2, 2))
    x = tl.reshape(tl.permute(x, (0, 1, 2, 4, 5, 3, 6, 7, 8)), (OUTER, ROWS, PIECES * 32, 2, 2))
    even, odd = tl.split(x)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit(do_not_specialize=["k"])
def piece_planes_kernel(x, out, k, stride_row, stride_column, PIECES: tl.constexpr):
    """out [rows, K up to a multiple of 128]: the planes of each piece of x, PIECES a program, with zeros behind K."""
    tiles = (k + 127) // 128
    across = tl.cdiv(tiles, PIECES)
    row = (tl.program_id(0) // across).to(tl.int64)
    first = tl.program_id(0) % across * PIECES
    column = first * 128 + tl.arange(0, PIECES * 128)
    values = tl.load(
        x + row * stride_row + column * stride_column, column < k // 16 * 16, other=0.0
    )  # k is a multiple of 16
    # Of each piece the planes 0 to 3, each in that order.
    values = tl.permute(tl.reshape(values, (PIECES, 4, 2, 2, 2, 4)), (0, 5, 2, 3, 1, 4))
    tl.store(out + row * (tiles * 128) + column, tl.reshape(values, (PIECES * 128,)), column < tiles * 128)
