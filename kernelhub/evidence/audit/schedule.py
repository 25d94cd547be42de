"""The calls of a kernel that are recomputed: first those of a new size, then a share of all.

A call is sampled if

1. its size is between two powers of two without an earlier call of this problem, or
2. it is the 1st, 2nd, 4th, 8th, ... call, as long as these are closer together than the share's calls, or
3. it is the one call that was drawn from its interval of ``1 / share`` calls.

The position is drawn for each interval, with a seed that differs between processes and problems. So a fault at every
100th call is found although intervals are multiples of 100, and ranks of one engine do not all stop at the same call.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Hashable

PHASE = secrets.randbits(64)  # seed of this process


class Schedule:
    """The calls of one problem.

    Args:
        share: share of the calls, above 0 and up to 1.
        seed: distinguishes this problem from others.
        phase: seed of the process.

    Attributes:
        due: number of the next call, from 0, that may be sampled at any size.
        sizes: sizes so far.
    """

    def __init__(self, share: float, seed: str, phase: int = PHASE) -> None:
        self._share = share
        self._random = random.Random(f"{phase} {seed}")
        self._stretch = 0
        self._place = self._draw()
        self._early = 1
        self.due = 0
        self.sizes: set[Hashable] = set()

    def takes(self, number: int, size: Hashable) -> bool:
        """Whether a call is sampled; sets when the next one is due. Numbers increase, but may skip values."""
        new = size not in self.sizes
        self.sizes.add(size)
        taken = new or number >= self.due
        if number >= self.due:
            while self._place <= number:
                self._stretch += 1
                self._place = self._draw()
            while self._early <= number:
                self._early *= 2
            self.due = min(self._place, self._early) if self._early * self._share <= 1 else self._place
        return taken

    def _draw(self) -> int:
        """The sampled call of an interval."""
        first, end = (-int(-stretch // self._share) for stretch in (self._stretch, self._stretch + 1))
        return self._random.randrange(first, max(end, first + 1))
