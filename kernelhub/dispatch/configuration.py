"""Sizes that a kernel could take another of, such as tiles: tried by `kernelhub tune`, kept as data, looked up by call.

A kernel whose record says `configurable` has an adapter that is a `Configurable`. To write one: name in
`configurations` what is worth a try, as plain values that JSON can hold, and take one of them in `configure`. Every
configuration must be right for every number of tokens; a configuration that is not is found by `tune`, which checks
each before it times it, and is a defect.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Configuration = Mapping[str, Any]

EXACT, NEAREST, DEFAULT = "exact", "nearest", "default"

# Measured sizes hold for as many tokens, and for up to this many times as many or as few. Tiles for 16 rows make a
# product of 4096 several times slower; those for 1024 do not.
REACH = 4.0


class Found(NamedTuple):
    """A configuration, and how well it fits.

    Attributes:
        configuration: what was measured; None where the kernel's own rule holds.
        source: ``"exact"`` (measured for this number of tokens), ``"nearest"`` (for another, within `REACH`) or
            ``"default"``.
        num_tokens: for how many tokens it was measured.
    """

    configuration: Configuration | None
    source: str
    num_tokens: int = 0


def look_up(measured: Mapping[int, Configuration], num_tokens: int) -> Found:
    """The configuration for a call of so many tokens: measured for as many, for the nearest number, or none.

    >>> table = {16: {"block_m": 16}, 64: {"block_m": 64}}
    >>> look_up(table, 64).source, look_up(table, 20).num_tokens, look_up(table, 4096).source
    ('exact', 16, 'default')
    """
    if not measured or num_tokens < 1:
        return Found(None, DEFAULT)
    if num_tokens in measured:
        return Found(measured[num_tokens], EXACT, num_tokens)

    def distance(tokens: int) -> float:
        return max(tokens, num_tokens) / min(tokens, num_tokens)

    nearest = min(measured, key=lambda tokens: (distance(tokens), tokens))
    if distance(nearest) > REACH:
        return Found(None, DEFAULT)
    return Found(measured[nearest], NEAREST, nearest)


class Configurable(abc.ABC):
    """What an adapter also is whose record says `configurable`."""

    @abc.abstractmethod
    def configurations(self, num_tokens: int, stage: int, best: Configuration | None) -> Sequence[Configuration]:
        """What is worth a try for a call of so many tokens; what the kernel takes by itself need not be among it.

        Args:
            num_tokens: of the call, more than 0.
            stage: 0 for the first answer. Where parts can be chosen one after another, a later stage gives variations
                of what was best so far; a stage that gives nothing ends the search.
            best: the fastest so far; None where that is what the kernel takes by itself.
        """

    @abc.abstractmethod
    def configure(self, measured: Mapping[int, Configuration]) -> None:
        """From now on take these, each for its number of tokens; as `look_up` says for others. None: as without.

        A configuration that this version of the kernel does not understand raises KeyError, TypeError or ValueError.
        """
