"""How many parts keep every multiprocessor at work."""

from __future__ import annotations

import functools


@functools.lru_cache(maxsize=4096)
def full_waves(programs: int, room: int, most: int) -> int:
    """Parts of each of `programs`, up to `most`, with which rounds of `room` programs are nearly full.

    As many as one round holds; if that fills less than 85 % of what the best number would, the fewest that fill
    as much.
    """
    filled = [programs * parts / (-(-programs * parts // room) * room) for parts in range(1, most + 1)]
    fewest = 1 + next(index for index, share in enumerate(filled) if share >= 0.85 * max(filled))
    return max(fewest, min(most, room // programs))
