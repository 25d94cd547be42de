# mypy: ignore-errors
"""Linear attention whose state decays: a program per sequence, head and block of the state's columns.

chunk_kernel, for a chunk of tokens after another:

    out = scale * (((q k^T) * decays between tokens) v + decay since the chunk's start * q state)
    state = decay of the chunk * state + (k * decay until the chunk's end)^T v

recurrent_kernel, for one token after another: state = decay * state + k^T v; out = scale * q state

The state stays in registers, in float32. Powers of the decay have exponents from 0 down, so none overflows. What is
multiplied with v or with the state goes to bfloat16 as q, k and v are; for float16, whose range states and scores may
leave, both sides go to TF32, which has as many bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.attention.softmax import within
from kernelhub.backends.triton.formats import LOG2E

_VARYING = ["tokens", "scale", "slots_before", "slots_after"]
_METADATA = ["decay", "before_at", "after_at", "cu_seqlens"]


@triton.jit
def _state_at(
    state, at, slots, sequence, head, d, columns, stride_n, stride_h, stride_d, stride_v, HAS_AT: tl.constexpr
):
    """Places of a tile of a sequence's state, and whether it has one of the slots."""
    slot = sequence
    if HAS_AT:
        slot = tl.load(at + sequence).to(tl.int64)
    places = slot * stride_n + head * stride_h + d[:, None] * stride_d + columns[None, :] * stride_v
    return state + places, (slot >= 0) & (slot < slots)


@triton.jit
def _sequence(sequence, tokens, cu_seqlens, RAGGED: tl.constexpr):
    """The sequence's place along the batch, its first row, and how many it has, none of them past `tokens`."""
    batch = sequence
    first = sequence * 0
    length = tokens
    if RAGGED:
        batch = sequence * 0
        start, length = within(cu_seqlens, sequence, tokens)
        first = start.to(tl.int64)
    return batch, first, length


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_METADATA)
def chunk_kernel(
    q,
    k,
    v,
    decay,
    cu_seqlens,
    before,
    before_at,
    after,
    after_at,
    out,
    tokens,
    slots_before,
    slots_after,
    scale,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_qd,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_kd,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_vd,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_od,
    stride_decay,
    stride_bn,
    stride_bh,
    stride_bd,
    stride_bv,
    stride_an,
    stride_ah,
    stride_ad,
    stride_av,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    RAGGED: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    HAS_BEFORE_AT: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    HAS_AFTER_AT: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """WIDE: what is multiplied with v or the state goes to float32, whose products are of PRECISION."""
    blocks: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    columns = program % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    head = (program // blocks % HEADS).to(tl.int64)
    sequence = (program // (blocks * HEADS)).to(tl.int64)
    batch, first, length = _sequence(sequence, tokens, cu_seqlens, RAGGED)
    d = tl.arange(0, D_PAD)
    tile = (d < D)[:, None] & (columns < DV)[None, :]
    state = tl.zeros([D_PAD, BLOCK_V], tl.float32)
    if HAS_BEFORE:
        places, there = _state_at(
            before, before_at, slots_before, sequence, head, d, columns,
            stride_bn, stride_bh, stride_bd, stride_bv, HAS_BEFORE_AT,
        )  # fmt: skip
        state = tl.load(places, tile & there, other=0.0)

    rate = tl.load(decay + head * stride_decay) * -LOG2E
    i = tl.arange(0, CHUNK)
    gap = i[:, None] - i[None, :]
    between = tl.where(gap >= 0, tl.exp2(rate * tl.maximum(gap, 0)), 0.0)
    since = tl.exp2(rate * (i + 1))

    q += batch * stride_qb + head * stride_qh + first * stride_qt
    k += batch * stride_kb + head * stride_kh + first * stride_kt
    v += batch * stride_vb + head * stride_vh + first * stride_vt
    out += batch * stride_ob + head * stride_oh + first * stride_ot
    q_at = i[:, None] * stride_qt + d[None, :] * stride_qd
    k_at = i[:, None] * stride_kt + d[None, :] * stride_kd
    v_at = i[:, None] * stride_vt + columns[None, :] * stride_vd
    out_at = i[:, None] * stride_ot + columns[None, :] * stride_od
    mixed: tl.constexpr = tl.float32 if WIDE else q.dtype.element_ty
    for start in range(0, length, CHUNK):
        rest = tl.minimum(length - start, CHUNK)
        valid = (i < rest)[:, None]
        q_tile = tl.load(q + q_at, valid & (d < D)[None, :], other=0.0)
        k_tile = tl.load(k + k_at, valid & (d < D)[None, :], other=0.0)
        v_tile = tl.load(v + v_at, valid & (columns < DV)[None, :], other=0.0).to(mixed)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * between
        acc = tl.dot(q_tile.to(mixed), state.to(mixed), input_precision=PRECISION) * since[:, None]
        acc = tl.dot(scores.to(mixed), v_tile, acc, input_precision=PRECISION)
        tl.store(out + out_at, (acc * scale).to(out.dtype.element_ty), valid & (columns < DV)[None, :])
        until = tl.exp2(rate * tl.maximum(rest - 1 - i, 0))
        faded = (k_tile.to(tl.float32) * until[:, None]).to(mixed)
        state = tl.dot(tl.trans(faded), v_tile, state * tl.exp2(rate * rest), input_precision=PRECISION)
        q += CHUNK * stride_qt
        k += CHUNK * stride_kt
        v += CHUNK * stride_vt
        out += CHUNK * stride_ot

    if HAS_AFTER:
        places, there = _state_at(
            after, after_at, slots_after, sequence, head, d, columns,
            stride_an, stride_ah, stride_ad, stride_av, HAS_AFTER_AT,
        )  # fmt: skip
        tl.store(places, state, tile & there)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_METADATA)
def recurrent_kernel(
    q,
    k,
    v,
    decay,
    cu_seqlens,
    before,
    before_at,
    after,
    after_at,
    out,
    tokens,
    slots_before,
    slots_after,
    scale,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_qd,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_kd,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_vd,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_od,
    stride_decay,
    stride_bn,
    stride_bh,
    stride_bd,
    stride_bv,
    stride_an,
    stride_ah,
    stride_ad,
    stride_av,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_V: tl.constexpr,
    RAGGED: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    HAS_BEFORE_AT: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    HAS_AFTER_AT: tl.constexpr,
):
    """Its arguments are those of chunk_kernel."""
    blocks: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    columns = program % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    head = (program // blocks % HEADS).to(tl.int64)
    sequence = (program // (blocks * HEADS)).to(tl.int64)
    batch, first, length = _sequence(sequence, tokens, cu_seqlens, RAGGED)
    d = tl.arange(0, D_PAD)
    tile = (d < D)[:, None] & (columns < DV)[None, :]
    state = tl.zeros([D_PAD, BLOCK_V], tl.float32)
    if HAS_BEFORE:
        places, there = _state_at(
            before, before_at, slots_before, sequence, head, d, columns,
            stride_bn, stride_bh, stride_bd, stride_bv, HAS_BEFORE_AT,
        )  # fmt: skip
        state = tl.load(places, tile & there, other=0.0)

    factor = tl.exp2(tl.load(decay + head * stride_decay) * -LOG2E)
    q += batch * stride_qb + head * stride_qh + first * stride_qt + d * stride_qd
    k += batch * stride_kb + head * stride_kh + first * stride_kt + d * stride_kd
    v += batch * stride_vb + head * stride_vh + first * stride_vt + columns * stride_vd
    out += batch * stride_ob + head * stride_oh + first * stride_ot + columns * stride_od
    for _ in range(length):
        q_row = tl.load(q, d < D, other=0.0).to(tl.float32)
        k_row = tl.load(k, d < D, other=0.0).to(tl.float32)
        v_row = tl.load(v, columns < DV, other=0.0).to(tl.float32)
        state = state * factor + k_row[:, None] * v_row[None, :]
        result = tl.sum(q_row[:, None] * state, 0) * scale
        tl.store(out, result.to(out.dtype.element_ty), columns < DV)
        q += stride_qt
        k += stride_kt
        v += stride_vt
        out += stride_ot

    if HAS_AFTER:
        places, there = _state_at(
            after, after_at, slots_after, sequence, head, d, columns,
            stride_an, stride_ah, stride_ad, stride_av, HAS_AFTER_AT,
        )  # fmt: skip
        tl.store(places, state, tile & there)
