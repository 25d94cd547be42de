"""What measurements on this machine say of one problem: which kernels are fastest, and with which sizes.

Values only. Where they come from is `kernelhub.evidence.tuning`, which the machine asks at the first decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from kernelhub.dispatch.configuration import Configuration

TUNED = "tuned"  # the source of a choice that measurements made


class Named(Protocol):
    """What measurements rank: kernel records, by their names."""

    @property
    def name(self) -> str: ...


NamedT = TypeVar("NamedT", bound=Named)


@dataclass(frozen=True)
class Tuned:
    """Measurements of one problem class.

    Attributes:
        kernels: names of those that were measured, best first.
        because: per kernel, what is said of it when it is the one chosen: its time, the next one's, noise and date.
        configurations: sizes that were faster than a kernel's own, by kernel and number of tokens.
    """

    kernels: tuple[str, ...]
    because: Mapping[str, str] = field(default_factory=dict)
    configurations: Mapping[str, Mapping[int, Configuration]] = field(default_factory=dict)

    def ranked(self, kernels: Iterable[NamedT]) -> tuple[NamedT, ...]:
        """Kernels as measured, then those that were not measured, in the order in which they are given."""
        place = {name: index for index, name in enumerate(self.kernels)}
        return tuple(sorted(kernels, key=lambda kernel: place.get(kernel.name, len(place))))


class TunedTable(Protocol):
    """All measurements of one device that hold."""

    def find(self, op: str, problem: Any) -> Tuned | None:
        """What was measured for a problem."""

    def plain(self) -> dict[str, Any]:
        """The table as plain values, for other ranks; empty if it says nothing."""
