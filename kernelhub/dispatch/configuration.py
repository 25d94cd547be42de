"""Configurations: tunable sizes of a kernel, such as tiles. `kernelhub tune` measures them; calls look them up.

A kernel whose record has `configurable=True` has an adapter that is a `Configurable`. To write one, list candidates in
`configurations` as plain JSON values, and apply one of them in `configure`. Every configuration must be correct for
every number of tokens. `tune` checks each before it times it; a wrong one is a defect of the kernel.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Configuration = Mapping[str, Any]

EXACT, NEAREST, DEFAULT = "exact", "nearest", "default"

# Measured sizes apply to a number of tokens up to this many times larger or smaller than the measured one. Tiles for
# 16 rows make a product of 4096 rows several times slower; those for 1024 do not.
REACH = 4.0


class ConfigurationMatch(NamedTuple):
    """Result of `look_up`.

    Attributes:
        configuration: the measured configuration; None for the kernel's default.
        source: ``"exact"`` (measured for this number of tokens), ``"nearest"`` (for another, within `REACH`) or
            ``"default"``.
        num_tokens: number of tokens that it was measured for; 0 for the default.
    """

    configuration: Configuration | None
    source: str
    num_tokens: int = 0


def look_up(measured: Mapping[int, Configuration], num_tokens: int) -> ConfigurationMatch:
    """The configuration for a call of `num_tokens`: measured for that number, for the nearest one, or the default.

    >>> table = {16: {"block_m": 16}, 64: {"block_m": 64}}
    >>> look_up(table, 64).source, look_up(table, 20).num_tokens, look_up(table, 4096).source
    ('exact', 16, 'default')
    """
    if not measured or num_tokens < 1:
        return ConfigurationMatch(None, DEFAULT)
    if num_tokens in measured:
        return ConfigurationMatch(measured[num_tokens], EXACT, num_tokens)

    def distance(tokens: int) -> float:
        return max(tokens, num_tokens) / min(tokens, num_tokens)

    nearest = min(measured, key=lambda tokens: (distance(tokens), tokens))
    if distance(nearest) > REACH:
        return ConfigurationMatch(None, DEFAULT)
    return ConfigurationMatch(measured[nearest], NEAREST, nearest)


class Configurable(abc.ABC):
    """Base class of adapters whose record has `configurable=True`."""

    @abc.abstractmethod
    def configurations(self, num_tokens: int, stage: int, best: Configuration | None) -> Sequence[Configuration]:
        """Candidates for a call of `num_tokens`. The kernel's default need not be among them.

        Args:
            num_tokens: tokens of the call, more than 0.
            stage: 0 for the first candidates. A later stage returns variations of the best configuration so far; an
                empty stage ends the search.
            best: the fastest configuration so far; None if that is the kernel's default.
        """

    @abc.abstractmethod
    def configure(self, measured: Mapping[int, Configuration]) -> None:
        """Use these configurations from now on, by number of tokens; `look_up` gives those of other numbers.

        An empty mapping restores the kernel's defaults.

        Raises:
            KeyError, TypeError, ValueError: this version of the kernel does not support a configuration.
        """
