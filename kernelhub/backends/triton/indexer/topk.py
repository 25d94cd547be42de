# mypy: ignore-errors
"""The k highest of each row, exactly, by radix selection.

Floats become integers of 32 bits, the highest the smallest, NaN first. Four launches each count one digit of 8 bits,
from the top, of those elements whose digits above are those of the k-th element. A fifth stores the places of all
elements before the k-th and of the first of those equal to it.

A row is split among programs, each with histograms of its own in `counts` [rows, 4, splits, 256]. From them each
program has the number of elements that the parts before it store, so positions are in ascending order and no program
waits for another. `state` [rows, 4, 2] holds the k-th element's digits so far, and its rank among the elements that
share them.
"""

from __future__ import annotations

import triton
import triton.language as tl

BINS = tl.constexpr(256)


@triton.jit
def _order(x):
    """Integers that are smaller the higher the float; -0 is 0, NaN the smallest of all."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    order = tl.where((bits >> 31) != 0, bits, bits ^ 0x7FFFFFFF)
    return tl.where(x != x, 0, order).to(tl.uint32)


@triton.jit
def _part(row, split, splits, starts, ends, stride_starts, stride_ends, columns, HAS_STARTS, HAS_ENDS, BLOCK):
    """Where a row starts, and the part of it, counted from there, that this program looks at."""
    start = 0
    end = columns
    if HAS_STARTS:
        start = tl.maximum(tl.load(starts + row * stride_starts), 0)
    if HAS_ENDS:
        end = tl.maximum(tl.minimum(tl.load(ends + row * stride_ends), columns), 0)  # the difference stays an int32
    length = tl.maximum(end - start, 0)
    share = tl.cdiv(tl.cdiv(length, BLOCK), splits) * BLOCK
    first = split * share
    return start, first, tl.minimum(first + share, length)


@triton.jit
def _histograms(counts, row, digit, splits, MOST: tl.constexpr):
    """Those of all parts of a row, [MOST, BINS]."""
    part = tl.arange(0, MOST)
    at = ((row * 4 + digit) * splits + part)[:, None] * BINS + tl.arange(0, BINS)[None, :]
    return tl.load(counts + at, (part < splits)[:, None], other=0)


@triton.jit
def _digit(totals, rank):
    """The digit of the element of that rank, counted from 1, and its rank among those with the same digit."""
    upto = tl.cumsum(totals, 0)
    before = upto < rank
    return tl.sum(before.to(tl.int32)), rank - tl.max(tl.where(before, upto, 0))


@triton.jit(
    do_not_specialize=["columns", "k", "splits", "stride_row"],
    do_not_specialize_on_alignment=["logits", "starts", "ends"],
)
def count_kernel(
    logits,
    starts,
    ends,
    counts,
    state,
    columns,
    k,
    splits,
    stride_row,
    stride_column,
    stride_starts,
    stride_ends,
    DIGIT: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):
    """Histogram of digit DIGIT, 0 the highest."""
    row = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    prefix = tl.full([], 0, tl.uint32)
    if DIGIT > 0:
        totals = tl.sum(_histograms(counts, row, DIGIT - 1, splits, MOST), 0)
        if DIGIT == 1:
            rank = tl.minimum(k, tl.sum(totals))
        else:
            prefix = tl.load(state + (row * 4 + DIGIT - 1) * 2).to(tl.uint32, bitcast=True)
            rank = tl.load(state + (row * 4 + DIGIT - 1) * 2 + 1)
        digit, rank = _digit(totals, rank)
        prefix = (prefix << 8) | digit.to(tl.uint32)
        if split == 0:
            tl.store(state + (row * 4 + DIGIT) * 2, prefix.to(tl.int32, bitcast=True))
            tl.store(state + (row * 4 + DIGIT) * 2 + 1, rank)

    start, first, last = _part(
        row, split, splits, starts, ends, stride_starts, stride_ends, columns, HAS_STARTS, HAS_ENDS, BLOCK
    )
    base = logits + row * stride_row
    found = tl.zeros([BINS], tl.int32)
    for offset in range(first, last, BLOCK):
        n = offset + tl.arange(0, BLOCK)
        x = tl.load(base + (start + n).to(tl.int64) * stride_column, n < last, other=float("-inf"))
        order = _order(x)
        counted = x != float("-inf")
        if DIGIT > 0:
            counted = counted & ((order >> (32 - 8 * DIGIT)) == prefix)
        digits = ((order >> (24 - 8 * DIGIT)) & 0xFF).to(tl.int32)
        found += tl.histogram(digits, BINS, mask=counted)
    tl.store(counts + ((row * 4 + DIGIT) * splits + split) * BINS + tl.arange(0, BINS), found)


@triton.jit(
    do_not_specialize=["columns", "k", "splits", "stride_row"],
    do_not_specialize_on_alignment=["logits", "starts", "ends", "out"],
)
def store_kernel(
    logits,
    starts,
    ends,
    counts,
    out,
    columns,
    k,
    splits,
    stride_row,
    stride_column,
    stride_starts,
    stride_ends,
    stride_or,
    stride_ok,
    HAS_STARTS: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):
    """The places, after all digits are counted."""
    row = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    earlier = (tl.arange(0, MOST) < split)[:, None]
    bins = tl.arange(0, BINS)[None, :]
    last_element = tl.full([], 0, tl.uint32)
    rank = k
    stored = 0  # by the parts before this one
    equal_before = 0
    taken = 0
    for level in tl.static_range(4):
        histograms = _histograms(counts, row, level, splits, MOST)
        totals = tl.sum(histograms, 0)
        if level == 0:
            taken = tl.minimum(k, tl.sum(totals))
            rank = taken
        digit, rank = _digit(totals, rank)
        stored += tl.sum(tl.sum(tl.where(earlier & (bins < digit), histograms, 0), 1), 0)
        if level == 3:
            equal_before = tl.sum(tl.sum(tl.where(earlier & (bins == digit), histograms, 0), 1), 0)
        last_element = (last_element << 8) | digit.to(tl.uint32)
    stored += tl.minimum(equal_before, rank)

    start, first, last = _part(
        row, split, splits, starts, ends, stride_starts, stride_ends, columns, HAS_STARTS, HAS_ENDS, BLOCK
    )
    base = logits + row * stride_row
    places = out + row * stride_or
    for offset in range(first, last, BLOCK):
        n = offset + tl.arange(0, BLOCK)
        x = tl.load(base + (start + n).to(tl.int64) * stride_column, n < last, other=float("-inf"))
        order = _order(x)
        there = x != float("-inf")
        equal = there & (order == last_element)
        among_equal = equal_before + tl.cumsum(equal.to(tl.int32), 0)
        take = (there & (order < last_element)) | (equal & (among_equal <= rank))
        at = stored + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(places + at.to(tl.int64) * stride_ok, n, take)
        equal_before += tl.sum(equal.to(tl.int32))
        stored += tl.sum(take.to(tl.int32))
    if split == splits - 1:
        for offset in range(taken, k, BLOCK):
            n = offset + tl.arange(0, BLOCK)
            tl.store(places + n.to(tl.int64) * stride_ok, tl.full([BLOCK], -1, tl.int32), n < k)
