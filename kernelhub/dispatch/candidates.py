"""What is registered for one op, as the selector sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kernelhub.dispatch.kernel import Kernel, KnownBad
from kernelhub.dispatch.order import Line


@dataclass(frozen=True, eq=False)
class Candidates:
    """The records of one op. They are told apart by identity: what a machine keeps of them is kept under them.

    Attributes:
        kernels: all records of the op; they are kept by name.
        lines: the op's heuristic.
        known_bad: entries that speak of any of the kernels.
        portable: those of backends whose kernels are the same program everywhere.
    """

    kernels: tuple[Kernel, ...]
    lines: tuple[Line, ...] = ()
    known_bad: tuple[KnownBad, ...] = ()
    portable: frozenset[Kernel] = frozenset()
    _about: dict[Kernel, tuple[KnownBad, ...]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernels", tuple(sorted(self.kernels, key=lambda kernel: kernel.name)))

    def known_bad_of(self, kernel: Kernel) -> tuple[KnownBad, ...]:
        """The entries that speak of a kernel, looked for once."""
        found = self._about.get(kernel)
        if found is None:
            found = tuple(e for e in self.known_bad if e.op in ("*", kernel.op) and kernel.matches(e.kernel))
            self._about[kernel] = found
        return found
