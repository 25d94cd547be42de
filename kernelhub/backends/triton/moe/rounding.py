# mypy: ignore-errors
"""Activations in opt-in formats; `kernelhub.ops.moe.experts.activations` states what each rounds.

mxfp8, nvfp4: what codes and scales of groups mean, a second scale left out. bfloat16 holds that exactly, so the
products of activations as they are run on quantised ones, on every GPU.
fp8_block_gate_up: gate and up, each rounded to e4m3 by 1 x 128, joined, and codes and scales of what comes of them.

Divisions round to nearest: Triton's `/` of float32 is two units off on a GPU, and gives other codes where two are
equally near.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.formats import (
    E2M1_MAX,
    E4M3_MAX,
    e2m1_to_float,
    e4m3_scaled,
    e8m0_to_float,
    float_to_e2m1,
    float_to_e4m3,
    float_to_e8m0_up,
)
from kernelhub.backends.triton.moe.matmul import _activated

LEAST_SCALE = tl.constexpr(2.0**-126)
LEAST_NVFP4_SCALE = tl.constexpr(2.0**-9)


@triton.jit
def _largest(x):
    """Of each row of magnitudes, NaN if one is."""
    return tl.max(tl.abs(x), 1), tl.max(tl.where(x != x, 1, 0), 1) != 0


@triton.jit
def _e4m3_to_float(codes):
    return e4m3_scaled(codes, tl.float32, False) * 256.0


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["second"])
def round_kernel(
    x,
    second,
    out,
    rows,
    stride_xm,
    stride_xk,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK groups of x [rows, K] as values; `out` [rows, K] is contiguous. `second` is nvfp4's scale of all."""
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    group = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    row = group // groups
    column = (group % groups * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    mask = (row < rows)[:, None] & (column < K)
    values = tl.load(x + row[:, None] * stride_xm + column * stride_xk, mask, other=0.0).to(tl.float32)
    largest, lost = _largest(values)
    if FORMAT == "mxfp8":
        scale = e8m0_to_float(float_to_e8m0_up(tl.div_rn(largest, E4M3_MAX)))
        by = scale
        codes = _e4m3_to_float(float_to_e4m3(tl.div_rn(values, tl.broadcast_to(by[:, None], values.shape))))
    else:
        of_all = tl.load(second)
        wanted = tl.div_rn(tl.div_rn(largest, E2M1_MAX), of_all)
        wanted = tl.where(wanted > LEAST_NVFP4_SCALE, wanted, LEAST_NVFP4_SCALE)
        scale = _e4m3_to_float(float_to_e4m3(wanted))
        by = scale * of_all
        codes = e2m1_to_float(float_to_e2m1(tl.div_rn(values, tl.broadcast_to(by[:, None], values.shape))))
    scale = tl.where(lost, float("nan"), scale)
    tl.store(out + row[:, None] * K + column, (codes * scale[:, None]).to(out.dtype.element_ty), mask)


@triton.jit
def _coded(x):
    """Codes of e4m3 [BLOCK, 128], and the scales of rows."""
    largest, lost = _largest(x)
    scale = tl.maximum(tl.div_rn(largest, E4M3_MAX), LEAST_SCALE)
    scale = tl.where(lost, float("nan"), scale)
    return float_to_e4m3(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))), scale


@triton.jit(do_not_specialize=["rows", "alpha", "limit"])
def join_kernel(
    both, codes, scales, rows, alpha, limit, INNER: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK times 128 columns of float32 gate and up [rows, 2I]; codes [rows, I], scales [rows, I / 128]."""
    pieces: tl.constexpr = INNER // 128
    piece = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    row = piece // pieces
    there = row < rows
    column = (piece % pieces * 128)[:, None] + tl.arange(0, 128)[None, :]
    at = both + row[:, None] * (2 * INNER) + column
    gate, of_gate = _coded(tl.load(at, there[:, None], other=0.0))
    up, of_up = _coded(tl.load(at + INNER, there[:, None], other=0.0))
    gate = _e4m3_to_float(gate) * of_gate[:, None]
    up = _e4m3_to_float(up) * of_up[:, None]
    made, scale = _coded(_activated(gate, up, alpha, limit, ACTIVATION))
    tl.store(scales + piece, scale, there)
    tl.store(codes + row[:, None] * INNER + column, made, there[:, None])
