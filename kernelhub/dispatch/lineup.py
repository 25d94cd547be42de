"""The kernels of an op as they stand on one device, whatever the problem: made once for a machine, kept by it.

Most of what speaks against a kernel does not depend on the problem: it is for other devices, or its library is not
installed. All of that is asked for every kernel of an op at the first decision about a device, so that a choice
afterwards need not ask it, and so that every selection on the device tells the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kernelhub.dispatch.candidates import Candidates
from kernelhub.dispatch.constraint import NOT_BUILT, Anything, Constraint, Rejection
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.order import Line, line_for, ranked
from kernelhub.dispatch.standing import Standing

OF_DEVICES = ("vendor", "capability")  # codes of what speaks against a device, whatever the problem
CONSTRAINT_ERROR = "constraint_error"  # code of a constraint that raises or answers what is no answer
_DEVICE = frozenset({"device"})
_MEND = "fix the backend that the kernel is from, or disable it"


class OnDevice(NamedTuple):
    """What of a record's constraints stands for every problem on a device of a machine.

    Attributes:
        parts: in the order of the constraints, what those say that read nothing but the device, and the others, which
            are to be asked; of a kernel for other devices there are no others.
        refused: whether something in `parts` speaks against the kernel, whoever asks for it.
        standing: of the kernel on the device's family.
    """

    parts: tuple[Rejection | Constraint, ...]
    refused: bool
    standing: Standing


class Lineup:
    """An op's kernels on one device of a machine.

    Attributes:
        on_device: by kernel.
    """

    def __init__(self, candidates: Candidates, problem: Any, machine: Machine) -> None:
        self.on_device = {kernel: _on_device(kernel, problem, machine) for kernel in candidates.kernels}
        self._candidates = candidates
        self._device = problem.device
        self._rankings: dict[str, tuple[Line | None, tuple[Kernel, ...]]] = {}

    def ranking(self, regime: str) -> tuple[Line | None, tuple[Kernel, ...]]:
        """The order line that holds in a phase, if there is one, and all kernels, best first."""
        known = self._rankings.get(regime)
        if known is None:
            line = line_for(self._candidates.lines, self._device, regime)
            known = self._rankings[regime] = line, ranked(self._candidates.kernels, line)
        return known


def lineup_of(candidates: Candidates, problem: Any, machine: Machine) -> Lineup:
    """The kernels as they stand on the problem's device; all else of the problem is not looked at."""
    kept = machine.on(problem.device)
    lineup: Lineup | None = kept.get(candidates)
    if lineup is None:
        lineup = kept[candidates] = Lineup(candidates, problem, machine)
    return lineup


def said_by(constraint: Constraint, problem: Any, machine: Machine) -> Rejection | None:
    """What a constraint says; one that raises speaks against its kernel and takes nothing else down."""
    try:
        said = constraint.reject(problem, machine)
        if said is None or (isinstance(said, Rejection) and all(type(word) is str for word in said)):
            return said
        what = f"answered {_words(said)}, which is neither None nor a Rejection of three strings"
    except (Exception, SystemExit) as error:  # constraints may be foreign
        what = f"raised {type(error).__name__}: {_words(error)}"
    return Rejection(CONSTRAINT_ERROR, f"{_words(constraint)} {what}", _MEND)


def _words(value: object) -> str:
    """A foreign value for people; its type where it cannot be written."""
    try:
        return repr(value) if not isinstance(value, BaseException) else str(value)
    except Exception:
        return f"a {type(value).__name__}"


def _on_device(kernel: Kernel, problem: Any, machine: Machine) -> OnDevice:
    parts: dict[Rejection | int, Rejection | Constraint] = {}  # what several probes say of one library is said once
    for place, constraint in enumerate(kernel.constraints):
        if isinstance(constraint, Anything):
            continue
        if not set(constraint.fields) <= _DEVICE:
            parts[place] = constraint
        elif (rejection := said_by(constraint, problem, machine)) is not None:
            parts.setdefault(rejection, rejection)
    against = [part for part in parts.values() if isinstance(part, Rejection)]
    elsewhere = any(rejection.code in OF_DEVICES for rejection in against)
    refused = any(rejection.code != NOT_BUILT for rejection in against)
    told = tuple(against) if elsewhere else tuple(parts.values())
    return OnDevice(told, refused, kernel.standing_on(problem.device.family))
