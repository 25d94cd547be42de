# mypy: ignore-errors
"""Words of 32 bits between memory and slots: what `slots.py` does for floats, for bytes of any dtype.

A word of all ones, which an empty slot holds, is sent as 0x7FFFFFFF. In rows of floats such a word is a NaN, or two or
four NaNs, and stays one; among ids it names no expert, as before.

Blocks have at least as many words as a program has threads, so that one thread alone polls a word and empties it: of
threads that share a word, one could empty it before another has read it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.comm.slots import take


@triton.jit
def slot_on(slots, peer, here, sender, RANK: tl.constexpr, WORLD: tl.constexpr):
    """The address of this rank's slot on another rank: one loop over ranks takes fewer registers than each unrolled."""
    address = slots[0].to(tl.int64)
    for rank in tl.static_range(1, WORLD):
        address = tl.where(peer == rank, slots[rank], address)
    return address + here + tl.where(peer > RANK, RANK, RANK - 1) * sender


@triton.jit
def filled(words):
    """Words to send: none of them EMPTY."""
    return tl.where(words == -1, 0x7FFFFFFF, words)


@triton.jit
def send_words(source, slot, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Store words in a slot."""
    for start in range(0, COUNT, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(slot + at, filled(tl.load(source + at, at < COUNT, other=0)), at < COUNT)


@triton.jit
def take_words(
    slot,
    target,
    missing,
    peer,
    until,
    late,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """Store the words that a rank sends; returns whether it is late."""
    for start in range(0, COUNT, BLOCK):
        at = start + tl.arange(0, BLOCK)
        words, late = take(slot + at, at < COUNT, missing, peer, until, late, CLOCK)
        tl.store(target + at, words, at < COUNT)
    return late
