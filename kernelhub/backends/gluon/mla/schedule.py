# mypy: ignore-errors
"""Which program walks which keys, computed from the lengths on the device, by every program for itself.

A sequence of n pairs of pages costs SETUP + n, one of no keys nothing. The costs of all sequences, end to end, are a
line, which is cut into equal parts. A part walks the pairs whose places are in it, of one sequence after another; so a
long sequence is shared by several parts, which `parts_of` computes.
"""

from __future__ import annotations

from kernelhub.backends.gluon.language import gl, gluon

PAIR = gl.constexpr(128)  # tokens
SETUP = gl.constexpr(2)  # pairs' worth of time to begin and end a sequence
FEWEST = gl.constexpr(2)  # the shortest part: below it merging costs more than it gains
LANES = gl.constexpr(256)  # sequences at a time
LINE = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))  # of a program of 4 warps
LINE_OF_WARP = gl.constexpr(gl.BlockedLayout([2], [32], [1], [0]))


@gluon.jit
def _sum_of(a, b):
    return a + b


@gluon.jit
def keys_of(seq_lens, sequence, room):
    """Keys of a sequence: no more than a row of the block table has room for; `room` where there are no lengths."""
    keys = room
    if seq_lens is not None:
        keys = gl.minimum(gl.maximum(gl.load(seq_lens + sequence), 0), room)
    return keys


@gluon.jit
def costs_of(seq_lens, places, num_seqs, room):
    """Costs of some sequences; 0 past the last."""
    if seq_lens is None:
        length = gl.where(places < num_seqs, room, 0)
    else:
        length = gl.load(seq_lens + places, mask=places < num_seqs, other=0)
    pairs = (gl.minimum(gl.maximum(length, 0), room) + (PAIR - 1)) // PAIR
    return gl.where(pairs > 0, pairs + SETUP, 0)


@gluon.jit
def cost_of_part(parts, seq_lens, num_seqs, room, LAYOUT: gl.constexpr):
    """The length of a part on the line of costs."""
    total = 0
    for start in range(0, num_seqs, LANES):
        total += gl.sum(costs_of(seq_lens, start + gl.arange(0, LANES, LAYOUT), num_seqs, room), 0)
    return gl.maximum((total + parts - 1) // parts, FEWEST)


@gluon.jit
def part_of_program(part, parts, seq_lens, num_seqs, room):
    """(begin, end) of a part on the line; its first sequence and the one past its last; where the first begins."""
    each = cost_of_part(parts, seq_lens, num_seqs, room, LINE)
    begin = part * each
    end = begin + each
    before = 0
    first = 0
    last = 0
    first_at = 0
    for start in range(0, num_seqs, LANES):
        places = start + gl.arange(0, LANES, LINE)
        cost = costs_of(seq_lens, places, num_seqs, room)
        ends = before + gl.associative_scan(cost, 0, _sum_of)
        passed = (ends <= begin) & (places < num_seqs)
        begun = (ends - cost < end) & (places < num_seqs)
        first += gl.sum(passed.to(gl.int32), 0)
        last += gl.sum(begun.to(gl.int32), 0)
        first_at += gl.sum(gl.where(passed, cost, 0), 0)
        before += gl.sum(cost, 0)
    return begin, end, first, last, first_at


@gluon.jit
def segment(seq_lens, sequence, at, begin, end, room):
    """(keys, first pair, pair past the last) that a part walks of a sequence at place `at`; where the next begins."""
    kv_len = keys_of(seq_lens, sequence, room)
    pairs = (kv_len + (PAIR - 1)) // PAIR
    low = gl.maximum(begin - at - SETUP, 0)
    high = gl.minimum(end - at - SETUP, pairs)
    return kv_len, low, high, at + pairs + gl.minimum(pairs, 1) * SETUP


@gluon.jit
def parts_of(sequence, parts, seq_lens, num_seqs, room):
    """(first part, last part) that walk a sequence with keys; and its keys. For a program of one warp."""
    each = cost_of_part(parts, seq_lens, num_seqs, room, LINE_OF_WARP)
    at = 0
    for start in range(0, sequence, LANES):
        places = start + gl.arange(0, LANES, LINE_OF_WARP)
        at += gl.sum(gl.where(places < sequence, costs_of(seq_lens, places, num_seqs, room), 0), 0)
    kv_len = keys_of(seq_lens, sequence, room)
    pairs = (kv_len + (PAIR - 1)) // PAIR
    return (at + SETUP) // each, (at + SETUP + pairs - 1) // each, kv_len
