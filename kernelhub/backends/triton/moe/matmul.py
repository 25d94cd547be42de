# mypy: ignore-errors
"""A matrix product whose rows were sorted by expert: a tile of one expert's rows by a tile of its weights.

    for k: acc += a[pairs, k] w[expert, columns, k]^T      GATED: gate and up side by side, two sums
    acc * scales, + bias, times the router's weight; GATED: act(gate) * up
    store to the row of each pair

Both products of a mixture of experts are this kernel: rows of the first are tokens (`pair // DIVISOR`), rows of the
second what the first stored for each pair. Weights, by WEIGHTS:

* plain: as they are; fp8 weights are these too where the GPU multiplies fp8 natively;
* fp8: bytes, decoded to the dtype of a;
* mxfp4, nvfp4: four in 16 bits, decoded and multiplied by their group's scale, which the dtype of a holds exactly;
  mxint4: the same, rounded to it. Then the product is computed transposed, and rows of a are planes
  (`backends/triton/fp4.py`).

Scales of 128 x 128 blocks (BLOCK_SCALED) and of 1 x 128 of a are multiplied in at each step, which is 128 wide;
those of rows, channels and experts at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.formats import LOG2E, e4m3_scaled, e8m0_to_float
from kernelhub.backends.triton.fp4 import group_factor, plus_quads, quads, spread, words_at
from kernelhub.backends.triton.two_scales import LEFT_OF_BOTH, of_both, times_both

_LEFT_OF_BOTH = tl.constexpr(LEFT_OF_BOTH)


@triton.jit
def _weights(
    w, columns, k, in_n, stride_wn, stride_wk, K, DTYPE: tl.constexpr, WEIGHTS: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_K] of one expert's weights from column `k` of K on, as DTYPE."""
    depth = k + tl.arange(0, BLOCK_K)
    mask = in_n[:, None] if EVEN_K else in_n[:, None] & (depth < K)[None, :]
    at = w + columns[:, None] * stride_wn + depth[None, :] * stride_wk
    if WEIGHTS == "fp8":
        values = e4m3_scaled(tl.load(at, mask, other=0), DTYPE, NATIVE)
    else:
        values = tl.load(at, mask, other=0.0)
    return values


@triton.jit
def _group_scales(scale, columns, place, in_n, stride_sn, GROUPS: tl.constexpr):
    """Bytes of the scales of groups `place` of an expert's columns."""
    return tl.load(
        scale + columns[:, None] * stride_sn + place[None, :], in_n[:, None] & (place < GROUPS)[None, :], other=0
    )


@triton.jit
def _decoded(
    acc, w, raw, columns, word, mask, x0, x1, x2, x3, stride_wn, stride_wk, DTYPE: tl.constexpr, WEIGHTS: tl.constexpr,
    NATIVE: tl.constexpr, PTX: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """acc plus a step's product of weights of four bits."""
    group: tl.constexpr = 16 if WEIGHTS == "nvfp4" else 32
    if WIDE:
        at = w + columns[:, None] * stride_wn * 8 + word[None, :]
    else:
        at = w + columns[:, None] * stride_wn + word[None, :] * (2 * stride_wk)
    words = words_at(at, mask, mask, stride_wk, WIDE)
    factor = spread(group_factor(raw, WEIGHTS, DTYPE, NATIVE, PTX), BLOCK_N, BLOCK_K // group, group // 4)
    w0, w1, w2, w3 = quads(words, factor, WEIGHTS, DTYPE, PTX)
    return plus_quads(acc, w0, w1, w2, w3, x0, x1, x2, x3)


@triton.jit
def _products_of_fp4(
    a_rows, there, w, scale, n, in_n, stride_wn, stride_wk, stride_sn, N: tl.constexpr, K: tl.constexpr,
    WEIGHTS: tl.constexpr, GATED: tl.constexpr, NATIVE: tl.constexpr, PTX: tl.constexpr, WIDE: tl.constexpr,
    LEFT: tl.constexpr, DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sums of gate and up, [BLOCK_M, BLOCK_N]."""
    group: tl.constexpr = 16 if WEIGHTS == "nvfp4" else 32
    groups: tl.constexpr = K // group
    # A step's scales are too small for an asynchronous copy. Those of nvfp4 are loaded a step ahead. (Doing so with
    # mxfp4 makes Triton put decoded weights through shared memory, and what follows from it costs more: 0.32 ms for
    # 0.28.)
    ahead: tl.constexpr = WEIGHTS == "nvfp4"
    gate = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    up = gate
    place = tl.arange(0, BLOCK_K // group)
    if ahead:
        next_raw = _group_scales(scale, n, place, in_n, stride_sn, groups)
        if GATED:
            next_also = _group_scales(scale, N + n, place, in_n, stride_sn, groups)
    for k in range(0, K, BLOCK_K):
        word = k // 4 + tl.arange(0, BLOCK_K // 4)
        in_k = (word < K // 4)[None, :]
        at = a_rows + word[None, :]
        mask = there[:, None] & in_k
        x0 = tl.load(at, mask, other=0.0)
        x1 = tl.load(at + K // 4, mask, other=0.0)
        x2 = tl.load(at + K // 2, mask, other=0.0)
        x3 = tl.load(at + K // 4 * 3, mask, other=0.0)
        first = k // group + place
        if ahead:
            raw = next_raw
            next_raw = _group_scales(scale, n, first + BLOCK_K // group, in_n, stride_sn, groups)
            if GATED:
                also = next_also
                next_also = _group_scales(scale, N + n, first + BLOCK_K // group, in_n, stride_sn, groups)
        else:
            raw = _group_scales(scale, n, first, in_n, stride_sn, groups)
            if GATED:
                also = _group_scales(scale, N + n, first, in_n, stride_sn, groups)
        mask = in_n[:, None] & in_k
        gate = _decoded(
            gate, w, raw, n, word, mask, x0, x1, x2, x3, stride_wn, stride_wk, DTYPE, WEIGHTS, NATIVE, PTX, WIDE,
            BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if GATED:
            up = _decoded(
                up, w, also, N + n, word, mask, x0, x1, x2, x3, stride_wn, stride_wk, DTYPE, WEIGHTS, NATIVE, PTX, WIDE,
                BLOCK_N, BLOCK_K,
            )  # fmt: skip
    return tl.trans(gate) * LEFT, tl.trans(up) * LEFT


@triton.jit
def _activated(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    gate = tl.where(gate == float("-inf"), -3.4028234663852886e38, gate)  # of which every activation is 0, not NaN
    if ACTIVATION == "silu":
        return gate / (1.0 + tl.exp2(-gate * LOG2E)) * up
    if ACTIVATION == "gelu":
        return gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    if ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 is sigmoid(2 z)
        twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1.0 + tl.exp2(-twice * LOG2E)) * up
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    if ACTIVATION == "swiglu_step":
        gate = gate / (1.0 + tl.exp2(-gate * LOG2E))
        return tl.where(gate > limit, limit, gate) * up
    gate = tl.where(gate > limit, limit, gate)
    if ACTIVATION == "swiglu_clamped":
        return gate / (1.0 + tl.exp2(-alpha * gate * LOG2E)) * up
    return gate / (1.0 + tl.exp2(-alpha * gate * LOG2E)) * (up + 1.0)


@triton.jit
def _block_scale(scale, block_n, block_k, stride_sn, stride_sk, E8M0: tl.constexpr):
    factor = tl.load(scale + block_n * stride_sn + block_k * stride_sk)
    return e8m0_to_float(factor) if E8M0 else factor


@triton.jit
def _products(
    a_rows, a_scale, row, there, w, w_scale, block_n, n, in_n, stride_ak, stride_wn, stride_wk, stride_sn, stride_sk,
    N: tl.constexpr, K: tl.constexpr, WEIGHTS: tl.constexpr, GATED: tl.constexpr, A_SCALE: tl.constexpr,
    BLOCK_SCALED: tl.constexpr, E8M0: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sums of gate and up, [BLOCK_M, BLOCK_N]."""
    even_k: tl.constexpr = K % BLOCK_K == 0
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = gate
    for k in range(0, K, BLOCK_K):
        depth = k + tl.arange(0, BLOCK_K)
        mask = there[:, None] if even_k else there[:, None] & (depth < K)[None, :]
        if FP8 and not NATIVE:
            left = e4m3_scaled(tl.load(a_rows + depth[None, :] * stride_ak, mask, other=0), DTYPE, False)
        else:
            left = tl.load(a_rows + depth[None, :] * stride_ak, mask, other=0.0)
        right = _weights(w, n, k, in_n, stride_wn, stride_wk, K, DTYPE, WEIGHTS, NATIVE, BLOCK_K, even_k)
        if GATED:
            also = _weights(w, N + n, k, in_n, stride_wn, stride_wk, K, DTYPE, WEIGHTS, NATIVE, BLOCK_K, even_k)
        if BLOCK_SCALED:
            # Steps and blocks are 128 wide, and no tile of columns lies in two blocks.
            scale = _block_scale(w_scale, block_n * BLOCK_N // 128, k // 128, stride_sn, stride_sk, E8M0)
            if A_SCALE == "group":
                groups: tl.constexpr = (K + 127) // 128
                of_a = tl.load(a_scale + row * groups + k // 128, there, other=0.0)[:, None]
                scale = of_both(of_a, scale)
            gate += tl.dot(left, tl.trans(right), input_precision="ieee") * scale
            if GATED:
                scale = _block_scale(w_scale, (N + block_n * BLOCK_N) // 128, k // 128, stride_sn, stride_sk, E8M0)
                if A_SCALE == "group":
                    scale = of_both(of_a, scale)
                up += tl.dot(left, tl.trans(also), input_precision="ieee") * scale
        elif FP8 and NATIVE:
            # Tensor cores of sm_90 keep 14 bits of a sum of fp8 products: take it over after each step.
            gate = tl.dot(left, tl.trans(right), gate, max_num_imprecise_acc=BLOCK_K)
            if GATED:
                up = tl.dot(left, tl.trans(also), up, max_num_imprecise_acc=BLOCK_K)
        else:
            gate = tl.dot(left, tl.trans(right), gate, input_precision="ieee")
            if GATED:
                up = tl.dot(left, tl.trans(also), up, input_precision="ieee")
    if BLOCK_SCALED and A_SCALE == "group":
        gate, up = gate * _LEFT_OF_BOTH, up * _LEFT_OF_BOTH
    return gate, up


_VARYING = ["pairs", "tiles", "alpha", "limit", "stride_cn", "stride_bn", "stride_rt", "stride_rk"]
_METADATA = [
    *("w_scale", "channel_scale", "bias", "router", "a_scale"),
    *("sorted_pairs", "tile_experts", "num_rows"),
]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_METADATA)
def experts_kernel(
    a,
    a_scale,
    w,
    w_scale,
    channel_scale,
    bias,
    router,
    sorted_pairs,
    tile_experts,
    num_rows,
    out,
    pairs,
    tiles,
    alpha,
    limit,
    stride_am,
    stride_ak,
    stride_we,
    stride_wn,
    stride_wk,
    stride_se,
    stride_sn,
    stride_sk,
    stride_ce,
    stride_cn,
    stride_be,
    stride_bn,
    stride_rt,
    stride_rk,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    DIVISOR: tl.constexpr,
    WEIGHTS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    A_SCALE: tl.constexpr,
    BLOCK_SCALED: tl.constexpr,
    E8M0: tl.constexpr,
    HAS_CHANNELS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROUTER: tl.constexpr,
    FP8: tl.constexpr,
    PLANES: tl.constexpr,
    NATIVE: tl.constexpr,
    PTX: tl.constexpr,
    WIDE: tl.constexpr,
    LEFT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """`out` [pairs, N] is contiguous, as are `a_scale` [rows] or [rows, ceil(K / 128)].

    N: columns of the result, of the gate alone where GATED. A_SCALE: "" (none), "one", "row" or "group".
    ROUTER: "" (none), "input" (before the bias), "output" (after it). FP8: a holds codes of fp8, bytes unless NATIVE.
    PLANES: columns of the result are planes, which another such product reads.
    Of weights of four bits: `a` holds planes; PTX, LEFT and WIDE are as in `backends/triton/fp4.py`.
    """
    program = tl.program_id(0)
    across: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    band = program // (GROUP_M * across)
    height = tl.minimum(tiles - band * GROUP_M, GROUP_M)
    tile = band * GROUP_M + program % (GROUP_M * across) % height
    block_n = program % (GROUP_M * across) // height
    if tile * BLOCK_M >= tl.load(num_rows):
        return
    expert = tl.load(tile_experts + tile).to(tl.int64)
    pair = tl.load(sorted_pairs + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    there = pair < pairs
    row = tl.where(there, pair // DIVISOR, 0).to(tl.int64)
    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = n < N
    w += expert * stride_we * (8 if WIDE else 1)
    if BLOCK_SCALED or WEIGHTS == "mxfp4" or WEIGHTS == "nvfp4" or WEIGHTS == "mxint4":
        w_scale += expert * stride_se
    dtype: tl.constexpr = a.dtype.element_ty if not FP8 or NATIVE else tl.float16
    a_rows = a + row[:, None] * stride_am
    if WEIGHTS == "mxfp4" or WEIGHTS == "nvfp4" or WEIGHTS == "mxint4":
        gate, up = _products_of_fp4(
            a_rows, there, w, w_scale, n, in_n, stride_wn, stride_wk, stride_sn, N, K, WEIGHTS, GATED, NATIVE, PTX,
            WIDE, LEFT, dtype, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        gate, up = _products(
            a_rows, a_scale, row, there, w, w_scale, block_n, n, in_n, stride_ak, stride_wn, stride_wk, stride_sn,
            stride_sk, N, K, WEIGHTS, GATED, A_SCALE, BLOCK_SCALED, E8M0, FP8, NATIVE, dtype, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if not NATIVE:
        # e4m3_scaled gives 1/256 of what bytes mean.
        if FP8:
            gate, up = gate * 65536.0, up * 65536.0
        elif WEIGHTS == "fp8":
            gate, up = gate * 256.0, up * 256.0
    of_a = 1.0
    if A_SCALE == "row":
        of_a = tl.load(a_scale + row, there, other=0.0)[:, None]
    elif A_SCALE == "one":
        of_a = tl.load(a_scale)
    if HAS_CHANNELS:
        at = channel_scale + expert * stride_ce + n * stride_cn
        gate = times_both(gate, of_a, tl.load(at, in_n, other=0.0)[None, :])
        if GATED:
            up = times_both(up, of_a, tl.load(at + N * stride_cn, in_n, other=0.0)[None, :])
    elif A_SCALE == "row" or A_SCALE == "one":
        gate, up = gate * of_a, up * of_a
    if ROUTER != "":
        token = (pair // TOP_K).to(tl.int64)
        weight = tl.load(router + token * stride_rt + pair % TOP_K * stride_rk, there, other=0.0)[:, None]
    if ROUTER == "input":
        gate, up = gate * weight, up * weight
    if HAS_BIAS:
        at = bias + expert * stride_be + n * stride_bn
        gate += tl.load(at, in_n, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(at + N * stride_bn, in_n, other=0.0).to(tl.float32)[None, :]
    result = gate
    if GATED:
        result = _activated(gate, up, alpha, limit, ACTIVATION)
    if ROUTER == "output":
        result = result * weight
    place = n % 4 * (N // 4) + n // 4 if PLANES else n
    at = out + pair.to(tl.int64)[:, None] * N + place[None, :]
    tl.store(at, result.to(out.dtype.element_ty), there[:, None] & in_n[None, :])
