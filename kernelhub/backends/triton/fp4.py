# mypy: ignore-errors
"""Decodes 4-bit weights for a matrix product: four elements at once into 16 bits each, in registers.

A word of 16 bits is four elements of a row, 4 j to 4 j + 3. The four of all words of a tile are four tiles, of columns
4 j + i, whose products with the columns 4 j + i of the activations add up to the whole:

    x w^T = sum over i < 4 of x[:, i::4] w[:, i::4]^T

So nothing is interleaved. Activations come as planes, `x[:, 0::4]` to `x[:, 3::4]` side by side (`planes_kernel`), and
weights are the first operand, which Hopper's wgmma takes from the registers where they are decoded.

On NVIDIA GPUs bits are moved by PTX, two words in a register: magnitude and sign as those of a bfloat16 or float16,
which are the value times 2^-126 or 2^-14, subnormals too. Two products make the value times its group's scale, each
exact: a code has 2 bits of mantissa, an e4m3 scale 4. A factor is left for the sums (`left_of`): of nvfp4, so that one
product is enough; of mxfp4, since bfloat16 and float32 hold an eighth of its largest element, 6 x 2^127, and of its
least, but not the largest. On an H200 a product of 128 experts with 2880 x 2880 mxfp4 weights and 2 rows each took
0.47 ms with two elements of a byte at once, which Triton packs byte by byte, and 0.28 ms with four of a word.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.formats import e2m1_to_float, e4m3_to_float, e8m0_to_float
from kernelhub.backends.triton.int4 import bfloat16_int4_quads, int4_to_float

_MOST_E4M3_BITS = {"bfloat16": 8, "float16": 7}
# Powers of two that are taken out of scales of e8m0 as they are decoded, so that their largest element is a number of
# bfloat16: 6 x 2^127 and 448 x 2^127.
LEFT_OF_MX = {"mxfp4": 2.0**3, "mxfp8": 2.0**8}


def by_ptx(vendor: str, dtype: str, weights: str) -> bool:
    """Whether weights are decoded by PTX. float16 does not hold the scales of mxfp4 and mxint4."""
    if vendor != "nvidia" or triton.knobs.runtime.interpret:
        return False
    return dtype == "bfloat16" or (dtype == "float16" and weights == "nvfp4")


def left_of(weights: str, dtype: str, ptx: bool) -> float:
    """The factor of the sums."""
    if weights == "nvfp4":
        return 2.0 ** _MOST_E4M3_BITS[dtype] if ptx else 1.0
    return LEFT_OF_MX.get(weights, 1.0)


@triton.jit
def bfloat16_quads(words):
    """int16 words as four tensors of bfloat16, first element first: codes times 2^-126."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 sign, size;
        shl.b32 sign, $4, 12; shl.b32 size, $4, 6; and.b32 size, size, 0x01C001C0;
        lop3.b32 $0, sign, 0x80008000, size, 0xEA;
        shl.b32 sign, $4, 8; shl.b32 size, $4, 2; and.b32 size, size, 0x01C001C0;
        lop3.b32 $1, sign, 0x80008000, size, 0xEA;
        shl.b32 sign, $4, 4; shr.u32 size, $4, 2; and.b32 size, size, 0x01C001C0;
        lop3.b32 $2, sign, 0x80008000, size, 0xEA;
        shr.u32 size, $4, 6; and.b32 size, size, 0x01C001C0;
        lop3.b32 $3, $4, 0x80008000, size, 0xEA;
        }""",
        "=&r,=&r,=&r,=&r,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def float16_quads(words):
    """int16 words as four tensors of float16, first element first: codes times 2^-14."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 sign, size;
        shl.b32 sign, $4, 12; shl.b32 size, $4, 9; and.b32 size, size, 0x0E000E00;
        lop3.b32 $0, sign, 0x80008000, size, 0xEA;
        shl.b32 sign, $4, 8; shl.b32 size, $4, 5; and.b32 size, size, 0x0E000E00;
        lop3.b32 $1, sign, 0x80008000, size, 0xEA;
        shl.b32 sign, $4, 4; shl.b32 size, $4, 1; and.b32 size, size, 0x0E000E00;
        lop3.b32 $2, sign, 0x80008000, size, 0xEA;
        shr.u32 size, $4, 3; and.b32 size, size, 0x0E000E00;
        lop3.b32 $3, $4, 0x80008000, size, 0xEA;
        }""",
        "=&r,=&r,=&r,=&r,r",
        [words],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def group_factor(raw, FORMAT: tl.constexpr, DTYPE: tl.constexpr, NATIVE: tl.constexpr, PTX: tl.constexpr):
    """Scales as they are held, as `quads` multiplies by them."""
    if FORMAT == "mxfp4":
        if PTX:
            # 2^(raw - 127) is the exponent of a bfloat16, 0 and NaN apart.
            bits = raw.to(tl.uint16) << 7
            bits = tl.where(raw == 0, 0x40, bits)
            bits = tl.where(raw == 255, 0x7FC0, bits).to(tl.uint16)
            factor = bits.to(tl.bfloat16, bitcast=True)
        else:
            factor = e8m0_to_float(raw) * 0.125
    elif FORMAT == "mxint4":
        factor = raw if PTX else raw.to(tl.float32)
    else:
        factor = e4m3_to_float(raw, tl.float32, NATIVE)
        if PTX:
            if tl.bfloat16 == DTYPE:
                factor = (factor * 3.3230699894622897e35).to(tl.bfloat16)  # 2^118: 448 of them are below 2^127
            else:
                factor = (factor * 128.0).to(tl.float16)
    return factor


@triton.jit
def spread(factor, ROWS: tl.constexpr, GROUPS: tl.constexpr, WORDS: tl.constexpr):
    """[ROWS, GROUPS] as [ROWS, GROUPS * WORDS], each WORDS times."""
    return tl.reshape(tl.broadcast_to(factor[:, :, None], (ROWS, GROUPS, WORDS)), (ROWS, GROUPS * WORDS))


@triton.jit
def quads(words, factor, FORMAT: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Words times what `spread` gives of `group_factor`: four tensors of DTYPE, values over `left_of`."""
    if PTX:
        if FORMAT == "mxint4":
            w0, w1, w2, w3 = bfloat16_int4_quads(words)
        elif tl.bfloat16 == DTYPE:
            w0, w1, w2, w3 = bfloat16_quads(words)
            if FORMAT == "mxfp4":
                one = tl.full(words.shape, 1.0633823966279327e37, tl.float32).to(tl.bfloat16)  # 2^123
                w0, w1, w2, w3 = w0 * one, w1 * one, w2 * one, w3 * one
        else:
            w0, w1, w2, w3 = float16_quads(words)
        w0, w1, w2, w3 = w0 * factor, w1 * factor, w2 * factor, w3 * factor
    elif FORMAT == "mxint4":
        w0 = (int4_to_float(words) * factor).to(DTYPE)
        w1 = (int4_to_float(words >> 4) * factor).to(DTYPE)
        w2 = (int4_to_float(words >> 8) * factor).to(DTYPE)
        w3 = (int4_to_float(words >> 12) * factor).to(DTYPE)
    else:
        w0 = (e2m1_to_float(words & 15) * factor).to(DTYPE)
        w1 = (e2m1_to_float((words >> 4) & 15) * factor).to(DTYPE)
        w2 = (e2m1_to_float((words >> 8) & 15) * factor).to(DTYPE)
        w3 = (e2m1_to_float((words >> 12) & 15) * factor).to(DTYPE)
    return w0, w1, w2, w3


@triton.jit
def words_at(at, mask, high_mask, stride_k, WIDE: tl.constexpr):
    """Words: int16 where WIDE, else bytes, of which the second lies `stride_k` behind the first, if there is one."""
    if WIDE:
        words = tl.load(at, mask, other=0)
    else:
        high = tl.load(at + stride_k, high_mask, other=0).to(tl.int16) << 8
        words = tl.load(at, mask, other=0).to(tl.int16) | high
    return words


@triton.jit
def plus_quads(acc, w0, w1, w2, w3, x0, x1, x2, x3):
    """acc [N, M] plus the products with four planes [M, WORDS]."""
    acc = tl.dot(w0, tl.trans(x0), acc, input_precision="ieee")
    acc = tl.dot(w1, tl.trans(x1), acc, input_precision="ieee")
    acc = tl.dot(w2, tl.trans(x2), acc, input_precision="ieee")
    return tl.dot(w3, tl.trans(x3), acc, input_precision="ieee")


@triton.jit
def product(
    x_at, in_m, w_at, scale_at, in_n, stride_wk, stride_sk, begin, end, K: tl.constexpr, WORDS_APART: tl.constexpr,
    GROUPS_APART: tl.constexpr, TOGETHER: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr,
    NATIVE: tl.constexpr, PTX: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Weights times activations [BLOCK_N, BLOCK_M], over the steps from `begin` to `end`.

    `x_at` [BLOCK_M, 1] are rows of planes, `w_at` and `scale_at` [BLOCK_N, 1] rows of weights and scales. TOGETHER
    steps lie on end, WORDS_APART and GROUPS_APART from the next.
    """
    group: tl.constexpr = 32 if FORMAT == "mxfp4" else 16
    groups: tl.constexpr = BLOCK_K // group
    width: tl.constexpr = (K + 3) // 4
    # A step's scales are too small for an asynchronous copy. Those of nvfp4 are loaded a step ahead. (Doing so with
    # mxfp4 makes Triton put decoded weights through shared memory, and costs more: 0.32 ms on an H200 for 0.28.)
    ahead: tl.constexpr = FORMAT == "nvfp4"
    place = tl.arange(0, groups)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    if ahead:
        ahead_mask = in_n & (begin * groups + place < (K + group - 1) // group)[None, :]
        ahead_at = begin // TOGETHER * GROUPS_APART + begin % TOGETHER * groups + place
        next_raw = tl.load(scale_at + ahead_at[None, :] * stride_sk, ahead_mask, other=0)
    for step in range(begin, end):
        word = step * (BLOCK_K // 4) + tl.arange(0, BLOCK_K // 4)
        in_k = (word < width)[None, :]
        at = x_at + word[None, :]
        mask = in_m & in_k
        x0 = tl.load(at, mask, other=0.0)
        x1 = tl.load(at + width, mask, other=0.0)
        x2 = tl.load(at + 2 * width, mask, other=0.0)
        x3 = tl.load(at + 3 * width, mask, other=0.0)
        if ahead:
            raw = next_raw
            ahead_mask = in_n & ((step + 1) * groups + place < (K + group - 1) // group)[None, :]
            ahead_at = (step + 1) // TOGETHER * GROUPS_APART + (step + 1) % TOGETHER * groups + place
            next_raw = tl.load(scale_at + ahead_at[None, :] * stride_sk, ahead_mask, other=0)
        else:
            mask = in_n & (step * groups + place < (K + group - 1) // group)[None, :]
            of_scale = step // TOGETHER * GROUPS_APART + step % TOGETHER * groups + place
            raw = tl.load(scale_at + of_scale[None, :] * stride_sk, mask, other=0)
        of_word = step // TOGETHER * WORDS_APART + step % TOGETHER * (BLOCK_K // 4) + tl.arange(0, BLOCK_K // 4)
        if not WIDE:
            of_word = of_word * (2 * stride_wk)
        words = words_at(w_at + of_word[None, :], in_n & in_k, in_n & (word * 4 + 2 < K)[None, :], stride_wk, WIDE)
        factor = spread(group_factor(raw, FORMAT, DTYPE, NATIVE, PTX), BLOCK_N, groups, group // 4)
        w0, w1, w2, w3 = quads(words, factor, FORMAT, DTYPE, PTX)
        acc = plus_quads(acc, w0, w1, w2, w3, x0, x1, x2, x3)
    return acc


@triton.jit
def store_planes(
    program, x, lengths, out, rows, most_rows, stride_group, stride_row, stride_column, K: tl.constexpr,
    MASKED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What the program of this number does of `planes_kernel`."""
    width: tl.constexpr = (K + 3) // 4
    across: tl.constexpr = (width + BLOCK - 1) // BLOCK
    first = program // across * BLOCK_ROWS
    row = first + tl.arange(0, BLOCK_ROWS)
    there = row < rows
    group = row // most_rows
    inside = row % most_rows
    if MASKED:
        there = there & (inside < tl.load(lengths + group, there, other=0))
    block = program % across * BLOCK
    column = block * 4 + tl.arange(0, BLOCK * 4)
    at = x + (group.to(tl.int64) * stride_group + inside.to(tl.int64) * stride_row)[:, None]
    values = tl.load(at + column[None, :] * stride_column, there[:, None] & (column < K)[None, :], other=0.0)
    even, odd = tl.split(tl.reshape(values, (BLOCK_ROWS, BLOCK * 2, 2)))
    x0, x2 = tl.split(tl.reshape(even, (BLOCK_ROWS, BLOCK, 2)))
    x1, x3 = tl.split(tl.reshape(odd, (BLOCK_ROWS, BLOCK, 2)))
    word = block + tl.arange(0, BLOCK)
    mask = there[:, None] & (word < width)[None, :]
    at = out + row.to(tl.int64)[:, None] * (4 * width) + word[None, :]
    tl.store(at, x0, mask)
    tl.store(at + width, x1, mask)
    tl.store(at + 2 * width, x2, mask)
    tl.store(at + 3 * width, x3, mask)


@triton.jit(
    do_not_specialize=["rows", "most_rows"],
    do_not_specialize_on_alignment=["lengths"],
)
def planes_kernel(
    x,
    lengths,
    out,
    rows,
    most_rows,
    stride_group,
    stride_row,
    stride_column,
    K: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [rows, K] = the columns 0, 4, 8 ... of x, then 1, 5, 9 ..., and so on, K up to a multiple of 4 with zeros.

    MASKED: rows are `most_rows` of each group, of which the first `lengths[group]` are there.
    """
    store_planes(
        tl.program_id(0), x, lengths, out, rows, most_rows, stride_group, stride_row, stride_column, K, MASKED,
        BLOCK_ROWS, BLOCK,
    )  # fmt: skip
