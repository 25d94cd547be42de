# mypy: ignore-errors
"""Grouped products: tiles of all groups, found on the device.

    tiles of group g = ceil(rows of g / BLOCK_M); their running sum gives the group of a tile
    for each tile of this program:
        acc = sum over K of a[rows] @ b[group, columns].T, both decoded in registers
        out[rows, columns] = acc * scales + bias

The grid is bounded by sizes on the host. Programs take the tiles that there are in turn, so none is started for
a tile that is not there. Tiles that follow each other share weights: first along M, GROUP_M of them, then along N.

SWAP computes the product transposed, so that N is the side on which matrix instructions are wide where few rows leave
M narrow. So are products of float4 weights (QUADS; `backends/triton/fp4.py`), except where a scale of theirs is applied
to the sum of each step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.formats import e2m1_to_float, e4m3_scaled, e4m3_to_float, e8m0_to_float
from kernelhub.backends.triton.fp4 import product
from kernelhub.backends.triton.two_scales import of_both, times_both

_VARYING = [
    "rows",
    "stride_asg",
    "stride_asm",
    "stride_ask",
    "stride_bsg",
    "stride_bsn",
    "stride_bsk",
    "stride_a_global",
    "stride_global",
    "stride_bias_g",
    "stride_bias_n",
]


@triton.jit
def scale_values(raw, FORMAT: tl.constexpr):
    """Scales as float32: from float32 itself, from e8m0 or e4m3 bytes."""
    if FORMAT == "e8m0":
        value = e8m0_to_float(raw)
    elif FORMAT == "e4m3":
        value = e4m3_to_float(raw, tl.float32, False)
    else:
        value = raw
    return value


@triton.jit
def unpacked(raw, dtype: tl.constexpr):
    """fp4 [N, K / 2] as `dtype` [N, K], exactly."""
    return tl.interleave(e2m1_to_float(raw & 15).to(dtype), e2m1_to_float(raw >> 4).to(dtype))


@triton.jit
def mx_values(raw, exponents, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A 256th of e4m3 bytes [ROWS, COLUMNS] times e8m0 bytes [ROWS, COLUMNS / 32], as bfloat16, exactly.

    448 x 2^127 is no number of bfloat16.
    """
    factors = e8m0_to_float(exponents).to(tl.bfloat16)
    wide = tl.broadcast_to(factors[:, :, None], (ROWS, COLUMNS // 32, 32))
    return e4m3_scaled(raw, tl.bfloat16, False) * tl.reshape(wide, (ROWS, COLUMNS))


@triton.jit(
    do_not_specialize=_VARYING,
    do_not_specialize_on_alignment=["a_scale", "b_scale", "a_global", "b_global", "bias", "lengths"],
)
def grouped_gemm_kernel(
    a,
    b,
    out,
    a_scale,
    b_scale,
    a_global,
    b_global,
    bias,
    lengths,
    rows,
    stride_ag,
    stride_am,
    stride_ak,
    stride_bg,
    stride_bn,
    stride_bk,
    stride_og,
    stride_om,
    stride_on,
    stride_asg,
    stride_asm,
    stride_ask,
    stride_bsg,
    stride_bsn,
    stride_bsk,
    stride_a_global,
    stride_global,
    stride_bias_g,
    stride_bias_n,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    MASKED: tl.constexpr,
    FORMAT: tl.constexpr,  # of the weights: "float", "e4m3", "e2m1", "mx" (mxfp8)
    NATIVE: tl.constexpr,
    A_SCALE: tl.constexpr,  # "", "tensor", "token", "group"
    A_SCALE_FORMAT: tl.constexpr,
    B_SCALE: tl.constexpr,  # "", "tensor", "channel", "block", "row" (one per row and step), "within" (QUADS)
    B_SCALE_FORMAT: tl.constexpr,
    QUADS: tl.constexpr,  # "mxfp4" or "nvfp4": a is planes
    PTX: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_A_GLOBAL: tl.constexpr,
    HAS_GLOBAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FACTOR: tl.constexpr,  # what decoding left out
    PRECISION: tl.constexpr,
    SWAP: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`rows` is M, or M_max; `lengths` are offsets, or group sizes."""
    groups = tl.arange(0, G_PAD)
    there = groups < G
    sizes = tl.minimum(tl.load(lengths + groups, there, other=0), rows)
    if not MASKED:
        sizes -= tl.maximum(tl.load(lengths + groups - 1, there & (groups > 0), other=0), 0)
    tiles = (tl.maximum(sizes, 0) + BLOCK_M - 1) // BLOCK_M
    upto = tl.cumsum(tiles, 0)
    m_tiles = tl.sum(tiles, 0)
    n_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N

    for tile in range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0)):
        strip = tile // (GROUP_M * n_tiles)
        inside = tile - strip * (GROUP_M * n_tiles)
        high = tl.minimum(m_tiles - strip * GROUP_M, GROUP_M)
        m_tile = strip * GROUP_M + inside % high
        n_tile = inside // high

        # How many groups end before this tile, and how many tiles they have: one reduction for both.
        passed = tl.sum(tl.where(upto <= m_tile, (tiles.to(tl.int64) << 32) + 1, 0), 0)
        group = passed & 0xFFFFFFFF
        first = (m_tile - (passed >> 32).to(tl.int32)) * BLOCK_M
        start = 0
        size = tl.minimum(tl.load(lengths + group), rows)
        if not MASKED:
            start = tl.maximum(tl.load(lengths + group - 1, group > 0, other=0), 0)
            size -= start

        # Rows and columns past the end are those at the end once more: loads need no mask, stores leave them out.
        m = first + tl.arange(0, BLOCK_M)
        n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        row = (start + tl.minimum(m, size - 1)).to(tl.int64)
        column = tl.minimum(n, N - 1).to(tl.int64)
        if QUADS != "":
            x_at = a + group * stride_ag + row[:, None] * stride_am
            if WIDE:
                w_at = b + group * (stride_bg * 8) + column[:, None] * stride_bn * 8
            else:
                w_at = b + group * stride_bg + column[:, None] * stride_bn
            s_at = b_scale + group * stride_bsg + column[:, None] * stride_bsn
            acc = product(
                x_at, (m < size)[:, None], w_at, s_at, (n < N)[:, None], stride_bk, stride_bsk, 0,
                (K + BLOCK_K - 1) // BLOCK_K, K, BLOCK_K // 4, BLOCK_K // (32 if QUADS == "mxfp4" else 16), 1, QUADS,
                a.dtype.element_ty, NATIVE, PTX, WIDE, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            ks = tl.arange(0, BLOCK_K)
            a_at = a + group * stride_ag + row[:, None] * stride_am + ks[None, :] * stride_ak
            if FORMAT == "e2m1":
                bytes_k = tl.arange(0, BLOCK_K // 2)
                b_at = b + group * stride_bg + column[:, None] * stride_bn + bytes_k[None, :] * stride_bk
            else:
                b_at = b + group * stride_bg + column[:, None] * stride_bn + ks[None, :] * stride_bk

            if SWAP:
                acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            else:
                acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            if FORMAT == "mx":
                spans = tl.arange(0, BLOCK_K // 32)
                t_at = a_scale + group * stride_asg + row[:, None] * stride_asm + spans[None, :] * stride_ask
                s_at = b_scale + group * stride_bsg + column[:, None] * stride_bsn + spans[None, :] * stride_bsk
            for step in range((K + BLOCK_K - 1) // BLOCK_K):
                left = K - step * BLOCK_K
                if K % BLOCK_K == 0:
                    x = tl.load(a_at)
                    w = tl.load(b_at)
                else:
                    x = tl.load(a_at, (ks < left)[None, :], other=0)
                    if FORMAT == "e2m1":
                        w = tl.load(b_at, (bytes_k * 2 < left)[None, :], other=0)
                    else:
                        w = tl.load(b_at, (ks < left)[None, :], other=0)

                if FORMAT == "e4m3":
                    if NATIVE:
                        x = x.to(tl.float8e4nv, bitcast=True)
                        w = w.to(tl.float8e4nv, bitcast=True)
                    else:
                        x = e4m3_scaled(x, tl.float16, False)
                        w = e4m3_scaled(w, tl.float16, False)
                elif FORMAT == "e2m1":
                    w = unpacked(w, x.dtype)
                elif FORMAT == "mx":
                    in_k = (spans * 32 < left)[None, :]
                    x = mx_values(x, tl.load(t_at, in_k, other=127), BLOCK_M, BLOCK_K)
                    w = mx_values(w, tl.load(s_at, in_k, other=127), BLOCK_N, BLOCK_K)
                    t_at += BLOCK_K // 32 * stride_ask
                    s_at += BLOCK_K // 32 * stride_bsk

                if B_SCALE == "block" or B_SCALE == "row":
                    if SWAP:
                        part = tl.dot(w, tl.trans(x), input_precision=PRECISION)
                    else:
                        part = tl.dot(x, tl.trans(w), input_precision=PRECISION)
                    if B_SCALE == "block":
                        s_at = b_scale + group * stride_bsg + (n_tile * BLOCK_N // 128) * stride_bsn + step * stride_bsk
                        s = scale_values(tl.load(s_at), B_SCALE_FORMAT)
                        t_at = a_scale + group * stride_asg + row * stride_asm + step * stride_ask
                        t = of_both(scale_values(tl.load(t_at), A_SCALE_FORMAT), s)
                        acc += part * (t[None, :] if SWAP else t[:, None])
                    else:
                        s_at = b_scale + group * stride_bsg + column * stride_bsn + step * stride_bsk
                        s = scale_values(tl.load(s_at), B_SCALE_FORMAT) * 0.125
                        acc += part * (s[:, None] if SWAP else s[None, :])
                elif FORMAT == "e4m3" and NATIVE:
                    # Hopper sums float8 products in few bits; each step's sum is added up in float32.
                    if SWAP:
                        acc = tl.dot(w, tl.trans(x), acc, max_num_imprecise_acc=BLOCK_K)
                    else:
                        acc = tl.dot(x, tl.trans(w), acc, max_num_imprecise_acc=BLOCK_K)
                else:
                    if SWAP:
                        acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
                    else:
                        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
                a_at += BLOCK_K * stride_ak
                if FORMAT == "e2m1":
                    b_at += BLOCK_K // 2 * stride_bk
                else:
                    b_at += BLOCK_K * stride_bk

        if SWAP:
            acc = tl.trans(acc)
        if FORMAT == "e4m3" and FACTOR != 1.0:
            acc *= FACTOR
        of_a = 1.0
        of_b = 1.0
        if A_SCALE == "tensor":
            of_a = tl.load(a_scale)
        elif A_SCALE == "token":
            of_a = tl.load(a_scale + group * stride_asg + row * stride_asm)[:, None]
        elif HAS_A_GLOBAL:
            of_a = tl.load(a_global + group * stride_a_global)
        if B_SCALE == "tensor":
            of_b = tl.load(b_scale + group * stride_bsg)
        elif B_SCALE == "channel":
            of_b = tl.load(b_scale + group * stride_bsg + column * stride_bsn)[None, :]
        elif HAS_GLOBAL:
            of_b = tl.load(b_global + group * stride_global)
        if (A_SCALE == "tensor" or A_SCALE == "token") or HAS_A_GLOBAL:
            if (B_SCALE == "tensor" or B_SCALE == "channel") or HAS_GLOBAL:
                acc = times_both(acc, of_a, of_b)
            else:
                acc *= of_a
        else:
            acc *= of_b
        if FORMAT != "e4m3" and FACTOR != 1.0:
            acc *= FACTOR
        if HAS_BIAS:
            acc += tl.load(bias + group * stride_bias_g + column * stride_bias_n).to(tl.float32)[None, :]
        out_at = out + group * stride_og + row[:, None] * stride_om + n.to(tl.int64)[None, :] * stride_on
        tl.store(out_at, acc.to(out.dtype.element_ty), (m < size)[:, None] & (n < N)[None, :])
