# mypy: ignore-errors
"""A matrix of float8 with a scale for each 32 columns as bfloat16: exact, of e4m3 over 2^8, of e5m2 over 2^16."""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.gemm.fp8.product import mx_values


@triton.jit(do_not_specialize=["first", "last"], do_not_specialize_on_alignment=["scale"])
def decode_kernel(
    codes,
    scale,
    out,
    first,
    last,
    stride_m,
    stride_k,
    stride_sm,
    stride_sk,
    K: tl.constexpr,
    E5M2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rows `first` to `last` of codes [m, k] and scales [m, ceil(k / 32)] to `out` [last - first, k], contiguous."""
    parts: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    tile = (tl.program_id(0) // parts).to(tl.int64)
    row = first + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) % parts * BLOCK_K + tl.arange(0, BLOCK_K)
    group = tl.program_id(0) % parts * (BLOCK_K // 32) + tl.arange(0, BLOCK_K // 32)
    kept = (row < last)[:, None] & (column < K)[None, :]
    there = (row < last)[:, None] & (group < (K + 31) // 32)[None, :]
    codes_at = codes + row[:, None] * stride_m + column.to(tl.int64)[None, :] * stride_k
    scales_at = scale + row[:, None] * stride_sm + group.to(tl.int64)[None, :] * stride_sk
    values = mx_values(codes_at, scales_at, kept, there, BLOCK_M, BLOCK_K, E5M2)
    tl.store(out + (row - first)[:, None] * K + column[None, :], values, kept)
