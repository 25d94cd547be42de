# mypy: ignore-errors
"""A float4 weight as a matrix of bfloat16 or float16, for products of so many rows that cuBLAS is worth a second pass.

    w [n, k] = e2m1(code) * scale of the group

which is exact: a code has 2 bits of mantissa, an e4m3 scale 4, and an e8m0 scale none. The global scale comes later,
and of e8m0 a factor of 2^3 (LEFT), since 6 x 2^127 is no number of bfloat16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.gemm.fp4.gemm import fp4_tile, scale_values, times_groups


@triton.jit(do_not_specialize=["first", "last"], do_not_specialize_on_alignment=["b_scale"])
def decode_kernel(
    b,
    b_scale,
    out,
    first,
    last,
    stride_bn,
    stride_bk,
    stride_tn,
    stride_tk,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """out [last - first, K] from the rows `first` to `last` of the weight, which is in tiles if TILE_N is not 0."""
    across: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    part = tl.program_id(0) % across
    row = tl.program_id(0) // across * BLOCK_N + tl.arange(0, BLOCK_N)
    n = (first + row).to(tl.int64)
    there = n < last
    byte = part * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
    group = part * (BLOCK_K // GROUP) + tl.arange(0, BLOCK_K // GROUP)
    if TILE_N:
        tiles_k: tl.constexpr = (K + TILE_K - 1) // TILE_K
        bytes_k: tl.constexpr = TILE_K // 2
        groups_k: tl.constexpr = TILE_K // GROUP
        tile = (n // TILE_N * tiles_k)[:, None]
        inside = (n % TILE_N)[:, None]
        at = ((tile + (byte // bytes_k)[None, :]) * TILE_N + inside) * bytes_k + (byte % bytes_k)[None, :]
        at_scale = ((tile + (group // groups_k)[None, :]) * TILE_N + inside) * groups_k + (group % groups_k)[None, :]
    else:
        at = n[:, None] * stride_bn + byte[None, :] * stride_bk
        at_scale = n[:, None] * stride_tn + group[None, :] * stride_tk
    raw = tl.load(b + at, there[:, None] & (byte < K // 2)[None, :], other=0)
    raw_scale = tl.load(b_scale + at_scale, there[:, None] & (group < K // GROUP)[None, :], other=0)
    scale = scale_values(raw_scale, FORMAT, NATIVE)
    value = times_groups(fp4_tile(raw, BLOCK_N, BLOCK_K), scale, BLOCK_N, BLOCK_K, GROUP)
    column = part * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = there[:, None] & (column < K)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * K + column[None, :], value.to(out.dtype.element_ty), mask)
