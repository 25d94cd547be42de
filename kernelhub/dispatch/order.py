"""The ranking of kernels by expected speed, from the lines of `backends/order` and the bands of records.

A line gives, for a family of devices and a regime of the op, kernels in the order in which they are tried, with
evidence. A kernel that is not in the line ranks by its band, before the first listed kernel of a lower band. So a new
kernel can be selected without a change of any line. This module does not test whether a kernel is supported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from kernelhub.dispatch.kernel import Kernel, KnownBad
from kernelhub.probes.device import DeviceFacts


@dataclass(frozen=True, eq=False)
class Line:
    """One line of an order file.

    Attributes:
        family: a `DeviceFacts.family`, ``"*"`` for every GPU without its own line, or a class of CPUs by their
            instructions, such as ``"cpu/avx2"``, whose lines come before those of ``"cpu"``.
        regime: a regime of the op's contract, or ``"*"``.
        kernels: names, best first.
        evidence: a measurement with device, versions and date, or a source.
        expected: the order comes from publications or from the hardware; this project did not measure it.
    """

    family: str
    regime: str
    kernels: tuple[str, ...]
    evidence: str
    expected: bool = False


@dataclass(frozen=True, eq=False)
class Candidates:
    """The records of one op. It compares by identity, since it is a key of a machine's cache.

    Attributes:
        kernels: all records of the op, sorted by name.
        lines: the op's order lines.
        known_bad: known defects, of any backend.
        portable: the kernels of portable backends.
    """

    kernels: tuple[Kernel, ...]
    lines: tuple[Line, ...] = ()
    known_bad: tuple[KnownBad, ...] = ()
    portable: frozenset[Kernel] = frozenset()
    _about: dict[Kernel, tuple[KnownBad, ...]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernels", tuple(sorted(self.kernels, key=lambda kernel: kernel.name)))

    @cached_property
    def made_of_parts(self) -> tuple[Kernel, ...]:
        """The kernels that are made of other ops."""
        return tuple(kernel for kernel in self.kernels if kernel.parts is not None)

    def known_bad_of(self, kernel: Kernel) -> tuple[KnownBad, ...]:
        """The known defects of a kernel, cached."""
        found = self._about.get(kernel)
        if found is None:
            found = tuple(e for e in self.known_bad if e.op in ("*", kernel.op) and kernel.matches(e.kernel))
            self._about[kernel] = found
        return found


def first(names: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    """These names, then all others in their order: a line that differs from another at its start."""
    return tuple(dict.fromkeys((*names, *others)))


def line_for(lines: Iterable[Line], device: DeviceFacts, regime: str) -> Line | None:
    """The line for a device and regime: the narrower family first, then the exact regime before ``"*"``."""
    families = (f"cpu/{device.arch}", "cpu") if device.type == "cpu" else (device.family, "*")
    fitting = [line for line in lines if line.family in families and line.regime in (regime, "*")]
    return min(fitting, key=lambda line: (families.index(line.family), line.regime == "*"), default=None)


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
