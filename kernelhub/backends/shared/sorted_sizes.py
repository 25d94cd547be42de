"""Sizes of what experts whose pairs are sorted take: rounds of tokens, pieces of pairs, counts, tiles of rows.

A pair is a token and one of its choices; `pairs.py` is the device code that counts them.
"""

from __future__ import annotations

import triton

# Bytes of what experts add, in the dtype in which it is stored; more tokens than that come in several rounds.
MOST_ADDED = 1 << 30
# Pairs that a program places: more compare each with more others, and fewer read more counts of pieces.
PIECE_OF_FEW, PIECE = 128, 256
COUNTED_AT_ONCE = 1024  # pairs, by a program
_LEAST_BINS = 32  # of a histogram: one for each thread of a warp


def tokens_of_a_round(num_tokens: int, row_bytes: int) -> int:
    """Tokens at a time, given the bytes of what the experts of one add."""
    return max(1, min(num_tokens, MOST_ADDED // row_bytes))


def bins_of(num_experts: int) -> int:
    """Counts of a piece: a power of two."""
    return max(_LEAST_BINS, int(triton.next_power_of_2(num_experts)))


def size_of_counts(pairs: int, bins: int) -> int:
    """Counts of all pieces, where a launch makes them."""
    return -(-pairs // PIECE) * bins


def most_tiles(pairs: int, num_experts: int, height: int) -> int:
    """The most tiles of so many rows that pairs can come to, however they are spread."""
    hit = min(pairs, num_experts)
    return hit + (pairs - hit) // height
