"""What is done about a wrong call: it is told, it is kept for `kernelhub replay`, and the kernel is quarantined."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kernelhub.dispatch.audits import QUARANTINE, AuditSettings
from kernelhub.dispatch.gate import GATE
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.making import at_fork
from kernelhub.dispatch.selection import Selection
from kernelhub.evidence.audit import replay
from kernelhub.evidence.audit.comparing import Comparison
from kernelhub.evidence.cases.case import Arguments
from kernelhub.evidence.checks import class_of
from kernelhub.evidence.quarantine import keep, kept_of, now
from kernelhub.evidence.results import CODES, IN_SERVICE, Check, Result
from kernelhub.probes.device import DeviceFacts

log = logging.getLogger("kernelhub.audit")


@dataclass(frozen=True)
class Found:
    """A call whose numbers were wrong.

    Attributes:
        selection: of the kernel.
        arguments: copies, as before the launch.
        results: copies of what the kernel gave.
        comparison: what is wrong with them.
    """

    selection: Selection[Any]
    arguments: Arguments
    results: dict[str, Tensor]
    comparison: Comparison

    @property
    def kernel(self) -> Kernel:
        assert self.selection.kernel is not None
        return self.selection.kernel

    @property
    def problem_class(self) -> str:
        """The class of problem, which is told once."""
        return class_of(HUB.registry.contracts[self.selection.op].schema, self.selection.problem)

    @property
    def figures(self) -> str:
        """What is wrong, as a sentence."""
        code = self.comparison.code
        return f"{CODES.get(code, code)}: {self.comparison.figures}; operands: {_forms(self.arguments)}"


_told: set[tuple[str, str, str, str]] = set()
_guard = threading.Lock()


def _renew() -> None:
    global _guard
    _guard = threading.Lock()


at_fork(_renew)


def found_wrong(found: Found, settings: AuditSettings) -> None:
    """Tell, keep and quarantine, once for each kernel and class of problem on a device."""
    kernel, device = found.kernel, found.selection.problem.device
    with _guard:
        key = (kernel.op, kernel.name, found.problem_class, str(device))
        if key in _told:
            return
        _told.add(key)
    path, why_not = replay.keep_case(found)
    unwritten = quarantine(kernel, device, found)
    told = [f"{kernel.op} {kernel.name}: wrong in service for {found.problem_class}: {found.figures}"]
    told.append(f"`kernelhub replay {path}` runs it again" if path else f"the case is not kept: {why_not}")
    told.append(_what_becomes_of_it(kernel, settings) + (f" ({unwritten})" if unwritten else ""))
    log.error("; ".join(told))
    if settings.action == QUARANTINE and not _why_not_at_once() and HUB.machine.heeds_evidence:
        HUB.forget_evidence()


def _what_becomes_of_it(kernel: Kernel, settings: AuditSettings) -> str:
    if not HUB.machine.heeds_evidence:
        return "it stays in use: KERNELHUB_EVIDENCE is 0"
    if settings.action != QUARANTINE:
        return "it is quarantined for the next process, and KERNELHUB_AUDIT_ACTION=quarantine would do so at once"
    why_not = _why_not_at_once()
    if why_not:
        return f"it is quarantined for the next process, and not at once: {why_not}"
    return "it is quarantined: calls choose anew, and a plan that is held runs it until it is prepared again"


def _why_not_at_once() -> str:
    """What speaks against choosing anew in this process; empty if nothing does."""
    if GATE.sealed:
        return "kernelhub is sealed, and another choice would have to be made, loaded and compiled while it serves"
    if HUB.agreed:
        return "ranks agreed on what runs, and this one would run another kernel than the others"
    return ""


def quarantine(kernel: Kernel, device: DeviceFacts, found: Found) -> str:
    """Write down that a kernel was wrong, beside what is known of it; empty, or why it is not on disk."""
    before = kept_of(kernel, device)
    label = label_of(found.problem_class)
    known = before.result.checks if before is not None else ()
    check = Check(label, IN_SERVICE, found.problem_class, found.comparison.ratio, found.figures)
    checks = (*(one for one in known if one.case != label), check)
    left_out = before.result.left_out if before is not None else 0
    return keep(kernel, device, Result(kernel.op, kernel.name, checks, left_out), now())


def lift(kernel: Kernel, device: DeviceFacts, problem_class: str) -> bool:
    """Take back what was written down for a class, since the call is right now; whether there was anything."""
    before, label = kept_of(kernel, device), label_of(problem_class)
    if before is None or not any(check.case == label for check in before.result.checks):
        return False
    checks = tuple(check for check in before.result.checks if check.case != label)
    keep(kernel, device, Result(kernel.op, kernel.name, checks, before.result.left_out), now())
    HUB.forget_evidence()
    return True


def label_of(problem_class: str) -> str:
    """The name of the check that stands for a class."""
    return f"in service: {problem_class}"


def forget_told() -> None:
    """Tell again what was told."""
    _told.clear()


def _forms(arguments: Arguments) -> str:
    """Dtypes and shapes of the tensors of a call."""
    return ", ".join(
        f"{name} {str(value.dtype)[6:]}{list(value.shape)}"
        for name, value in arguments.items()
        if isinstance(value, Tensor)
    )
