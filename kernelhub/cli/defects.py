"""Known defects: their conditions, in words, and which affect this machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from kernelhub.cli.facets import ops
from kernelhub.cli.here import obstacles, plain_selection
from kernelhub.cli.matrix import limit_of
from kernelhub.dispatch.constraint import Constraint, Package
from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel, KnownBad
from kernelhub.dispatch.reasons import evaluate
from kernelhub.dispatch.registry import Registered
from kernelhub.probes.device import DeviceFacts

_OF_MACHINES = frozenset({"device"})


class Defect(NamedTuple):
    """A known defect that affects a machine.

    Attributes:
        kernel: the affected record.
        entry: the entry of the defect.
        problems: the affected problems, in words; empty if all are affected.
    """

    kernel: Kernel
    entry: KnownBad
    problems: str


def words(conditions: Iterable[Constraint]) -> str:
    """Conditions that must all hold, in words."""
    return "; ".join(_word(one) for one in conditions)


def kernels_of(entry: KnownBad, kernels: Iterable[Kernel]) -> list[Kernel]:
    """The records that an entry affects."""
    return [kernel for kernel in kernels if entry.op in ("*", kernel.op) and kernel.matches(entry.kernel)]


def defects(registered: Registered, device: DeviceFacts) -> Iterator[Defect]:
    """The defects of a backend's kernels that could otherwise run on a device of this machine."""
    for entry in registered.known_bad:
        of_machine, of_problem = _parts(entry)
        for kernel in kernels_of(entry, registered.kernels):
            if _holds(of_machine, kernel, device) and _runs(ops()[kernel.op], kernel, device):
                yield Defect(kernel, entry, words(of_problem))


def _parts(entry: KnownBad) -> tuple[list[Constraint], list[Constraint]]:
    """Conditions on the machine and its devices, and those on the problem."""
    of_machine = [one for one in entry.where if set(one.fields) <= _OF_MACHINES]
    return of_machine, [one for one in entry.where if one not in of_machine]


def _holds(conditions: Iterable[Constraint], kernel: Kernel, device: DeviceFacts) -> bool:
    problem: Any = ops()[kernel.op].problem(device=device)
    return all(evaluate(condition, problem, HUB.machine) is None for condition in conditions)


def _runs(record: OpRecord[Any], kernel: Kernel, device: DeviceFacts) -> bool:
    """Whether known defects are the only rejections of a kernel on a device here."""
    against = obstacles(kernel, plain_selection(record.name, device))
    return all(rejection.code == "known_bad" for rejection in against)


def _word(condition: Constraint) -> str:
    if isinstance(condition, Package):
        return f"{condition.name} {condition.versions}".strip()
    return limit_of(condition) or str(condition)
