"""Which calls of a kernel are recomputed: first those of a new size, then a share of all.

A call is taken if

1. its size falls between two powers of two in which no earlier call of this problem did, or
2. it is the 1st, 2nd, 4th, 8th, ... call, as long as these lie closer than the share's calls, or
3. it is the one of its stretch of ``1 / share`` calls whose place was drawn for that stretch.

The places are drawn anew for each stretch, by a generator that starts elsewhere in each process and for each problem:
a fault that shows at every 100th call is not missed because stretches are multiples of 100, and ranks of one engine do
not all stop at the same call.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Hashable

PHASE = secrets.randbits(64)  # of this process


class Schedule:
    """The calls of one problem.

    Args:
        share: of the calls, above 0 and up to 1.
        seed: what tells this problem from others.
        phase: of the process.

    Attributes:
        due: number of the next call, counted from 0, that may be taken whatever its size.
        sizes: the sizes that were met.
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
        """Whether a call is taken; sets when the next is due. Numbers rise, but may skip some."""
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
        """The call that is taken of a stretch."""
        first, end = (-int(-stretch // self._share) for stretch in (self._stretch, self._stretch + 1))
        return self._random.randrange(first, max(end, first + 1))
