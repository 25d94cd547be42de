"""How decode in parts of equal work cuts sequences, whatever its keys are."""

from __future__ import annotations


def parts_alike(most: int, num_seqs: int) -> int:
    """At most so many parts, so that sequences of one length are cut alike, or not at all.

    Up to a twentieth of what runs at once is left out for that; else there are as many parts as may be.
    """
    parts = -(-num_seqs // -(-num_seqs // most)) if num_seqs > most else most // num_seqs * num_seqs
    return parts if parts * 20 >= most * 19 else most
