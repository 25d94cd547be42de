"""The cases of one kernel, checked by one process or by several that share them, and the result, which is stored."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.evidence.apart import Child, Ended
from kernelhub.evidence.budgets import QUICK_BUDGET_S
from kernelhub.evidence.call import OutOfMemory, Unavailable
from kernelhub.evidence.cases import CASES
from kernelhub.evidence.checks import DeviceUnusable, Subject
from kernelhub.evidence.here import Here
from kernelhub.evidence.quarantine import Note, Record, begun, changing, keep, kept_of, now
from kernelhub.evidence.results import EVERY, IN_SERVICE, Check, Result, is_of_serving
from kernelhub.evidence.served import cases_for, names_of
from kernelhub.ops.case import Case
from kernelhub.probes.device import facts


class CaseRun:
    """One verification of one kernel. Threads that `ask` at a time share its cases, each with a process of its own.

    Args:
        subject: the kernel.
        quick: only the quick cases, and those that failed before.
        limit_s: time limit from the first case on; cases that are left then are counted.
        label: the label of the only case, if there is but one.
        served: for a quick run, the problems that the kernel will serve: only cases that concern them, and that have
            not passed before. All quick cases by default.

    Attributes:
        was_wrong: whether a stored result has failures.
        device_lost: whether an error left the device unusable.
        unwritten: why the result is not on disk; empty if it is.
    """

    def __init__(
        self, subject: Subject, quick: bool, limit_s: float, label: str | None = None, served: Sequence[Any] = ()
    ) -> None:
        self.subject, self.kernel = subject, subject.kernel
        self.device_lost, self.unwritten = False, ""
        self._limit_s, self._where = limit_s, facts(subject.device)
        before = kept_of(self.kernel, self._where)
        self._failed = {check.case: check for check in before.result.failures} if before is not None else {}
        self.was_wrong = bool(self._failed)
        known = list(subject.cases.cases())
        self._labels = {case.label for case in known}
        self._passed: tuple[Check, ...] = ()  # in earlier runs, and not made again
        if label is not None:
            self._cases, self._covers = [case for case in known if case.label == label], _covers(before)
        elif not served or not quick:
            self._cases, self._covers = _in_order(known, quick, self._failed), (EVERY,)
        else:
            self._passed = tuple(check for check in before.result.checks if check.ok) if before is not None else ()
            passed = {check.case for check in self._passed}
            wanted = {case.label for case in cases_for(subject, known, served) if case.label not in passed}
            needed = [case for case in known if case.label in wanted or case.label in self._failed]
            self._cases = _in_order(needed, False, self._failed)
            self._covers = tuple(dict.fromkeys((*_covers(before), *names_of(subject.cases, served))))
        self._some = quick or label is not None
        self._waiting = deque(self._cases)
        self._ahead = tuple(self._cases) if self.kernel.compiles_when_made else ()  # until the first check
        self._checks: dict[str, Check] = {}
        self._left_out, self._why_not, self._refused = 0, "", ""
        self._guard, self._asking = threading.Lock(), 0
        self._begun_s, self._broken, self._note = 0.0, False, contextlib.ExitStack()
        self._written: Note | None = None
        self._result: Result | None = None

    @property
    def left(self) -> int:
        """Cases that no process has begun."""
        return len(self._waiting)

    def ask(self, asked_in: Child | Here) -> Result | None:
        """Check cases until none is left.

        Returns:
            The result, once it is stored; None if it was stored before, or another thread still checks a case.
        """
        if not self._entered():
            return None
        try:
            while (case := self._next()) is not None:
                self._check(case, asked_in)
        except BaseException:
            self._broken = True
            raise
        finally:
            finished = self._left()
        return self._result if finished else None

    def _entered(self) -> bool:
        """Count this thread in, the first one after a note that the kernel is being verified; False if it is done."""
        with self._guard:
            if self._broken or (self._begun_s and not self._waiting):
                return False
            if not self._begun_s:
                self._begun_s = time.monotonic()
                self._written = self._note.enter_context(begun(self.kernel, self._where))
            self._asking += 1
            return True

    def _next(self) -> Case | None:
        with self._guard:
            if self._checks and time.monotonic() - self._begun_s > self._limit_s:
                self._left_out += len(self._waiting)
                self._waiting.clear()
            return self._waiting.popleft() if self._waiting and not self._broken else None

    def _check(self, case: Case, asked_in: Child | Here) -> None:
        found: Check | str | None = None
        ends = left_out = False
        why_not = ""
        with self._guard:
            ahead, self._ahead = self._ahead, ()
        try:
            found = asked_in.check(self.subject, case, ahead)
        except Unavailable as error:
            ends, why_not = True, str(error)
        except OutOfMemory:
            left_out = True
        except DeviceUnusable as error:
            ends, found, self.device_lost = True, error.check, True
        except Ended as error:
            ends, found = True, error.check
        with self._guard:
            self._left_out += left_out
            self._why_not = self._why_not or why_not
            if isinstance(found, Check):
                self._checks[case.label] = found
            elif found is not None:
                self._refused = self._refused or found
            if ends:
                self._left_out += len(self._waiting) if isinstance(found, Check) and not self.device_lost else 0
                self._waiting.clear()

    def _left(self) -> bool:
        """Count this thread out. The last one stores the result and returns True, unless an error ended a check."""
        with self._guard:
            self._asking -= 1
            if self._asking:
                return False
            with self._note:  # earlier results come back unless a new one is stored
                if self._broken:
                    return False
                self._result = result = self._made()
                assert self._written is not None
                self._written.ended = bool(result.checks)  # the result replaces the note
                if result.checks:
                    with changing:
                        self.unwritten = keep(self.kernel, self._where, result, now())
            return True

    def _made(self) -> Result:
        """The result: the checks in the order of the cases, and earlier failures that still stand.

        An earlier failure stays until its case runs again; a full run drops cases that no longer exist. A failure at a
        model's sizes stays until that problem class is verified again (see `earn`), one of an audit until `kernelhub
        replay` of its call passes: no case covers it.
        """
        checks = tuple(self._checks[case.label] for case in self._cases if case.label in self._checks)
        stays = {check.case for check in self._failed.values() if is_of_serving(check) or check.code == IN_SERVICE}
        some = self._some or self._left_out > 0
        unasked = [check for name, check in self._failed.items() if name not in self._checks]
        standing = [check for check in unasked if check.case in stays or (some and check.case in self._labels)]
        why_not = self._why_not or ("" if checks else f"it supports none of the cases: {self._refused}")
        seconds = time.monotonic() - self._begun_s
        result = Result(self.kernel.op, self.kernel.name, checks, self._left_out, why_not, seconds, self._covers)
        return replace(result, checks=(*self._passed, *checks, *standing)) if checks or self._passed else result


def quick_run(kernel: Kernel, device: torch.device, served: Sequence[Any] = ()) -> CaseRun:
    """A run of the quick cases of a kernel's op. The caller resets selections afterwards: `HUB.forget_evidence`.

    Args:
        served: the problems that the kernel will serve, if only the cases that concern them are needed.
    """
    subject = Subject(HUB.function(kernel.op), kernel, CASES[kernel.op], device)
    return CaseRun(subject, True, QUICK_BUDGET_S, served=served)


def _covers(before: Record | None) -> tuple[str, ...]:
    return before.result.covers if before is not None else ()


def _in_order(cases: list[Case], quick: bool, failed: Mapping[str, Check]) -> list[Case]:
    """The cases of a run: those that failed before, then the quick ones, then the rest."""
    wanted = [case for case in cases if not quick or case.quick or case.label in failed]
    return sorted(wanted, key=lambda case: (case.label not in failed, not case.quick))
