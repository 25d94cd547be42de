"""Handling of a wrong call: it is reported and stored for `kernelhub replay`, and the kernel is quarantined."""

from __future__ import annotations

import logging
import threading

from kernelhub.dispatch.audits import QUARANTINE, AuditSettings
from kernelhub.dispatch.gate import GATE
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.making import at_fork
from kernelhub.evidence.audit import replay
from kernelhub.evidence.audit.found import WrongCall, quarantine

log = logging.getLogger("kernelhub.audit")

_reported: set[tuple[str, str, str, str]] = set()
_guard = threading.Lock()


def _renew() -> None:
    global _guard
    _guard = threading.Lock()


at_fork(_renew)


def found_wrong(found: WrongCall, settings: AuditSettings) -> None:
    """Report, store and quarantine, once for each kernel and problem class on a device."""
    kernel, device = found.kernel, found.selection.problem.device
    with _guard:
        key = (kernel.op, kernel.name, found.problem_class, str(device))
        if key in _reported:
            return
        _reported.add(key)
    path, why_not = replay.keep_case(found)
    unwritten = quarantine(found)
    sentences = [f"{kernel.op} {kernel.name}: wrong in service for {found.problem_class}: {found.figures}"]
    sentences.append(f"`kernelhub replay {path}` runs it again" if path else f"the case is not stored: {why_not}")
    sentences.append(_consequence(kernel, settings) + (f" ({unwritten})" if unwritten else ""))
    log.error("; ".join(sentences))
    if settings.action == QUARANTINE and not _why_not_at_once() and HUB.machine.evidence is not None:
        HUB.forget_evidence()


def _consequence(kernel: Kernel, settings: AuditSettings) -> str:
    if HUB.machine.evidence is None:
        return "it stays in use: KERNELHUB_EVIDENCE is 0"
    if settings.action != QUARANTINE:
        return "it is quarantined for the next process, and KERNELHUB_AUDIT_ACTION=quarantine would do so immediately"
    why_not = _why_not_at_once()
    if why_not:
        return f"it is quarantined for the next process, not immediately: {why_not}"
    return "it is quarantined: calls select again; an existing plan runs it until it is prepared again"


def _why_not_at_once() -> str:
    """Why this process must not select again; empty if it may."""
    if GATE.sealed:
        return "kernelhub is sealed, and another kernel would have to be selected, loaded and compiled while it serves"
    if HUB.agreed:
        return "ranks agreed on what runs, and this one would run another kernel than the others"
    return ""


def forget_reported() -> None:
    """Clear the reports, so that they are made again."""
    _reported.clear()
