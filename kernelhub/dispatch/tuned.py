"""Measurements of one problem class: the ranking of kernels, and their fastest sizes.

This module has only the types. `kernelhub.evidence.tuning` measures and stores the values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from kernelhub.dispatch.configuration import Configuration

TUNED = "tuned"  # the source of a selection by measurements


class Named(Protocol):
    """A value with a name, such as a kernel record."""

    @property
    def name(self) -> str: ...


NamedT = TypeVar("NamedT", bound=Named)


@dataclass(frozen=True)
class Tuned:
    """Measurements of one problem class.

    Attributes:
        kernels: names of the measured kernels, best first.
        because: by kernel, the reason if it is selected: its time, that of the next kernel, noise and date.
        configurations: sizes that were faster than a kernel's defaults, by kernel and number of tokens.
    """

    kernels: tuple[str, ...]
    because: Mapping[str, str] = field(default_factory=dict)
    configurations: Mapping[str, Mapping[int, Configuration]] = field(default_factory=dict)

    def ranked(self, kernels: Iterable[NamedT]) -> tuple[NamedT, ...]:
        """The measured kernels, best first, then the others in the given order."""
        place = {name: index for index, name in enumerate(self.kernels)}
        return tuple(sorted(kernels, key=lambda kernel: place.get(kernel.name, len(place))))


class TunedTable(Protocol):
    """All valid measurements of one device."""

    def find(self, op: str, problem: Any) -> Tuned | None:
        """The measurements for a problem; None if there are none."""

    def plain(self) -> dict[str, Any]:
        """The table as plain values, for other ranks; empty if it has no entries."""
