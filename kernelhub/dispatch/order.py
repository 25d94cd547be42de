"""The heuristic: which kernel is expected fastest, read from data in `backends/order`.

A line says, for a family of devices and a regime of the op, in which order kernels are tried, and on
what evidence. A kernel in no line is placed by its band: before the first listed kernel of a lower
band, so a new kernel can be reached without touching any line.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from kernelhub.dispatch.kernel import Kernel, KnownBad
from kernelhub.probes.device import DeviceFacts


@dataclass(frozen=True, eq=False)
class Line:
    """One line of an order file.

    Attributes:
        family: `DeviceFacts.family` it holds for, or ``"*"`` for every GPU without a line of its own.
        regime: a regime of the op's contract, or ``"*"``.
        kernels: names, best first.
        evidence: a measurement with device, versions and date, or a source.
        expected: the order is what others publish, or what is expected of the hardware: nobody measured it here.
    """

    family: str
    regime: str
    kernels: tuple[str, ...]
    evidence: str
    expected: bool = False


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


def first(names: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    """These names, then all others in their order: a line that differs from another in its beginning."""
    return tuple(dict.fromkeys((*names, *others)))


def line_for(lines: Iterable[Line], device: DeviceFacts, regime: str) -> Line | None:
    """The line that holds: the device's own family before ``"*"``, then the exact regime before ``"*"``."""
    families = (device.family,) if device.type == "cpu" else (device.family, "*")
    fitting = [line for line in lines if line.family in families and line.regime in (regime, "*")]
    return min(fitting, key=lambda line: (line.family == "*", line.regime == "*"), default=None)


@lru_cache(maxsize=1024)
def ranked(kernels: tuple[Kernel, ...], line: Line | None) -> tuple[Kernel, ...]:
    """All kernels, best first. The order is total: line, then band, then name."""
    by_band = sorted(kernels, key=lambda kernel: (-kernel.band, kernel.name))
    if line is None:
        return tuple(by_band)
    position = {name: index for index, name in enumerate(line.kernels)}
    listed = sorted((kernel for kernel in by_band if kernel.name in position), key=lambda k: position[k.name])
    result: list[Kernel] = []
    unlisted = [kernel for kernel in by_band if kernel.name not in position]
    for kernel in listed:
        while unlisted and unlisted[0].band > kernel.band:
            result.append(unlisted.pop(0))
        result.append(kernel)
    return (*result, *unlisted)
