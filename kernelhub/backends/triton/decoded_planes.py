# mypy: ignore-errors
"""Quantised activations as planes of bfloat16, which kernels of float4 weights multiply (`backends/triton/fp4.py`).

    out[:, i::4 side by side] = code * scale of its 16 or 32 columns * PART

A code has up to 4 bits of mantissa, an e4m3 scale 4 and an e8m0 scale 1: bfloat16, which has 8, holds the product. What
e8m0 scales may be beyond it, so PART of it is made, and sums are multiplied by the rest (`LEFT_OF_MX`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.formats import e2m1_to_float, e4m3_to_float, e8m0_to_float


@triton.jit
def _plane(value, factor):
    return (value * factor).to(tl.bfloat16)


@triton.jit(do_not_specialize=["rows", "most_rows"], do_not_specialize_on_alignment=["lengths", "scale"])
def decoded_planes_kernel(
    x,
    scale,
    lengths,
    out,
    rows,
    most_rows,
    stride_group,
    stride_row,
    stride_column,
    stride_scale_group,
    stride_scale_row,
    stride_scale_column,
    K: tl.constexpr,
    FORMAT: tl.constexpr,  # "nvfp4", "mxfp4", "mxfp8"
    PART: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [rows, K up to a multiple of 4] from bytes x. Masked rows are as of `planes_kernel`."""
    width: tl.constexpr = (K + 3) // 4
    across: tl.constexpr = (width + BLOCK - 1) // BLOCK
    span: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
    row = tl.program_id(0) // across * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    there = row < rows
    group = row // most_rows
    inside = row % most_rows
    if MASKED:
        there = there & (inside < tl.load(lengths + group, there, other=0))
    block = tl.program_id(0) % across * BLOCK
    word = block + tl.arange(0, BLOCK)
    mask = there[:, None] & (word < width)[None, :]

    at = scale + (group.to(tl.int64) * stride_scale_group + inside.to(tl.int64) * stride_scale_row)[:, None]
    raw = tl.load(at + (word * 4 // span)[None, :] * stride_scale_column, mask, other=0)
    factor = e4m3_to_float(raw, tl.float32, False) if FORMAT == "nvfp4" else e8m0_to_float(raw) * PART

    at = x + (group.to(tl.int64) * stride_group + inside.to(tl.int64) * stride_row)[:, None]
    if FORMAT == "mxfp8":
        column = block * 4 + tl.arange(0, BLOCK * 4)
        codes = tl.load(at + column[None, :] * stride_column, there[:, None] & (column < K)[None, :], other=0)
        values = e4m3_to_float(codes, tl.float32, False)
        even, odd = tl.split(tl.reshape(values, (BLOCK_ROWS, BLOCK * 2, 2)))
        x0, x2 = tl.split(tl.reshape(even, (BLOCK_ROWS, BLOCK, 2)))
        x1, x3 = tl.split(tl.reshape(odd, (BLOCK_ROWS, BLOCK, 2)))
    else:
        byte = block * 2 + tl.arange(0, BLOCK * 2)
        codes = tl.load(at + byte[None, :] * stride_column, there[:, None] & (byte < (K + 1) // 2)[None, :], other=0)
        low, high = tl.split(tl.reshape(codes, (BLOCK_ROWS, BLOCK, 2)))
        x0, x1 = e2m1_to_float(low & 15), e2m1_to_float(low >> 4)
        x2, x3 = e2m1_to_float(high & 15), e2m1_to_float(high >> 4)

    at = out + row.to(tl.int64)[:, None] * (4 * width) + word[None, :]
    tl.store(at, _plane(x0, factor), mask)
    tl.store(at + width, _plane(x1, factor), mask)
    tl.store(at + 2 * width, _plane(x2, factor), mask)
    tl.store(at + 3 * width, _plane(x3, factor), mask)
