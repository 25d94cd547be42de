# mypy: ignore-errors
"""The k highest of up to BLOCK elements, exactly, by a search for the k-th in registers.

Floats become integers of the same order, the highest the smallest, NaN first. A program loads a part of a row once and
narrows the range of the k-th integer, counting those up to a middle of it, until exactly k are or one
integer is left: some ten counts of three instructions per element, where a histogram of 8 bits costs some sixty.

A row of more elements is taken in parts. Each part's k highest, in ascending order, are candidates of the next launch,
which reads their places from [rows, parts, k], -1 where there are fewer. Of equal elements the first are taken, in a
part and of the parts, so how a row is split changes nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOWHERE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _order(x):
    """int32 that is smaller the higher the float; -0 is 0, NaN the smallest of all, -inf NOWHERE."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits & 0x7FFFFFFF, bits ^ -1)
    order = tl.where(x != x, -2147483648, order)
    return tl.where(x == float("-inf"), NOWHERE, order)


@triton.jit
def _value(order):
    """The float of that order."""
    return tl.where(order < 0, order ^ -1, order | -2147483648).to(tl.float32, bitcast=True)


@triton.jit(
    do_not_specialize=["columns", "k", "parts", "stride_row"],
    do_not_specialize_on_alignment=["logits", "starts", "ends", "candidates", "places"],
)
def select_kernel(
    logits,
    starts,
    ends,
    candidates,
    places,
    columns,
    k,
    parts,
    stride_row,
    stride_column,
    stride_starts,
    stride_ends,
    stride_pr,
    stride_pk,
    HAS_STARTS: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """LISTED: elements are those at `candidates` [rows, columns], of which there are `columns`."""
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    start = 0
    end = columns
    if HAS_STARTS:
        start = tl.maximum(tl.load(starts + row * stride_starts), 0)
    if HAS_ENDS:
        # Not below 0, so that the difference to `start` stays an int32.
        end = tl.maximum(tl.minimum(tl.load(ends + row * stride_ends), columns if not LISTED else NOWHERE), 0)
    length = columns
    if not LISTED:
        length = tl.maximum(end - start, 0)
    n = part * BLOCK + tl.arange(0, BLOCK)
    base = logits + row * stride_row + start.to(tl.int64) * stride_column if HAS_STARTS else logits + row * stride_row
    if LISTED:
        at = tl.load(candidates + row * columns + n, n < columns, other=-1)
        x = tl.load(base + at.to(tl.int64) * stride_column, at >= 0, other=float("-inf"))
    else:
        x = tl.load(base + n.to(tl.int64) * stride_column, n < length, other=float("-inf"))
    order = _order(x)
    # The taken-th integer is from `low` to `high`: `few` are below, `many` up to there. A middle is where it would be
    # if values lay evenly, now above and now below by as much as random ones stray; every fourth halves the integers.
    many = tl.sum((order < NOWHERE).to(tl.int32), 0)
    few = many * 0
    taken = tl.minimum(many, k)
    high = tl.max(tl.where(order < NOWHERE, order, -2147483648), 0)
    low = tl.where(many <= k, high, tl.min(order, 0))
    step = 0
    while low < high:
        room = (many - few).to(tl.float32)
        aim = (taken - few).to(tl.float32) + tl.where((step & 1) == 0, 0.5, -0.5) * tl.sqrt(room)
        guess = _order(_value(low) + (_value(high) - _value(low)) * (aim / room))
        guess = tl.maximum(tl.minimum(guess, high - 1), low)
        middle = tl.where((step & 3) == 3, (low & high) + ((low ^ high) >> 1), guess)
        upto = tl.sum((order <= middle).to(tl.int32), 0)
        enough = upto >= taken
        high = tl.where(enough, middle, high)
        many = tl.where(enough, upto, many)
        low = tl.where(upto == taken, middle, tl.where(enough, low, middle + 1))
        few = tl.where(enough, few, upto)
        step += 1
    before = order < high
    equal = order == high
    rank = taken - tl.sum(before.to(tl.int32), 0)  # how many equal ones are taken

    # Both counts in one scan: BLOCK is at most 2^15.
    upto = tl.cumsum(before.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
    equals = (upto >> 16) & 0xFFFF
    take = (order < high) | ((order == high) & (equals <= rank))
    to = (upto & 0xFFFF) + tl.minimum(equals, rank) - 1
    places += row * stride_pr + part.to(tl.int64) * k * stride_pk
    found = n
    if LISTED:
        found = tl.load(candidates + row * columns + n, take, other=-1)
    tl.store(places + to.to(tl.int64) * stride_pk, found, take)
    for offset in range(taken, k, BLOCK):
        rest = offset + tl.arange(0, BLOCK)
        tl.store(places + rest.to(tl.int64) * stride_pk, tl.full([BLOCK], -1, tl.int32), rest < k)
