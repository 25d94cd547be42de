# mypy: ignore-errors
"""Device code that exchanges of tokens share: rows as words of 32 bits, choices, and sums of a rank."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def words_at(address):
    """A pointer to words from an address, or from a pointer to what they are."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def copy_words(source, target, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Store words where they are used."""
    for start in range(0, COUNT, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, at < COUNT, other=0), at < COUNT)


@triton.jit
def own_choices(topk_ids, topk_weights, row, tokens, lane, TOP_K: tl.constexpr):
    """Ids of a row of this rank, and the bits of its weights; of padding no expert."""
    mask = (lane < TOP_K) & (row < tokens)
    ids = tl.load(topk_ids + row * TOP_K + lane, mask, other=-1)
    weights = tl.load(topk_weights + row * TOP_K + lane, mask, other=0.0)
    return ids, weights.to(tl.int32, bitcast=True)


@triton.jit
def write_choices(
    ids,
    weights,
    into,
    lane,
    local_ids,
    local_weights,
    counts,
    TOP_K: tl.constexpr,
    RANK: tl.constexpr,
    LOCAL: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """Write ids and the bits of weights of a token as those of this rank."""
    choice = lane < TOP_K
    named = choice & (ids >= RANK * LOCAL) & (ids < RANK * LOCAL + LOCAL)
    tl.store(local_ids + into * TOP_K + lane, tl.where(named, ids - RANK * LOCAL, -1), choice)
    shown = tl.where(named, weights.to(tl.float32, bitcast=True), 0.0)
    tl.store(local_weights + into * TOP_K + lane, shown, choice)
    if COUNTED:
        tl.atomic_add(counts + tl.where(named, ids - RANK * LOCAL, 0), 1, named, sem="relaxed")


@triton.jit
def is_needed(ids, choice, low, LOCAL: tl.constexpr):
    """Whether one of a token's experts is among those from `low` on."""
    return tl.max((choice & (ids >= low) & (ids < low + LOCAL)).to(tl.int32), 0) > 0


@triton.jit
def sum_here(y, places, weights, row, at, H: tl.constexpr, TOP_K: tl.constexpr, SUMMED: tl.constexpr):
    """The sum of a received token over the experts of this rank, at some columns, in float32."""
    if SUMMED:
        total = tl.load(y + row * H + at, at < H, other=0.0).to(tl.float32)
    elif TOP_K <= 8:  # all rows are loaded at once, for which the registers suffice
        total = tl.zeros(at.shape, tl.float32)
        for choice in tl.static_range(TOP_K):
            named = tl.load(places + row * TOP_K + choice)
            weight = tl.load(weights + row * TOP_K + choice, named >= 0, other=0.0)
            value = tl.load(y + named.to(tl.int64) * H + at, (at < H) & (named >= 0), other=0.0)
            total += weight * value.to(tl.float32)
    else:
        total = tl.zeros(at.shape, tl.float32)
        for choice in range(TOP_K):
            named = tl.load(places + row * TOP_K + choice)
            if named >= 0:
                weight = tl.load(weights + row * TOP_K + choice)
                total += weight * tl.load(y + named.to(tl.int64) * H + at, at < H, other=0.0).to(tl.float32)
    return total
