"""Calls that were recomputed in service (`KERNELHUB_AUDIT`): the settings, and the counts that reports read.

What recomputes them is `kernelhub.evidence.audit`; nothing of it is loaded while the share is 0.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

RECORD, QUARANTINE = ACTIONS = ("record", "quarantine")


@dataclass(frozen=True)
class AuditSettings:
    """What is audited.

    Attributes:
        share: of the calls, from 0 (none) to 1 (all).
        num_bytes: most memory for copies and recomputing at one time.
        action: ``"record"``: a wrong kernel is quarantined for the next process; ``"quarantine"``: at once.
    """

    share: float = 0.0
    num_bytes: int = 1 << 30
    action: str = RECORD


OFF = AuditSettings()

# Why a sampled call was not recomputed.
SKIPPED = {
    "time": "its reference takes tokens one by one, and there are too many",
    "bytes": "its copies and recomputing it take more than KERNELHUB_AUDIT_BYTES",
    "memory": "the device has too little free memory",
    "pending": "as many calls as may wait for the device are waiting",
    "capture": "it was captured in a CUDA graph, or ran in the memory pool of one",
    "lost": "the device is lost",
    "packed": "its weight is arranged for the kernel, and what it was made from is not known here",
    "no_numbers": "the reference gives no number, or one beyond the result's range, where the result differs",
    "failed": "recomputing it raised an error",
    "unread": "its launch was given what the audit does not know",
}


@dataclass(frozen=True)
class Audited:
    """The audits of one kernel of one op.

    Attributes:
        checked: calls that were compared.
        wrong: calls of these whose numbers were wrong.
        disputed: calls of these that another kernel answers otherwise, where the reference could not decide.
        skipped: calls that were sampled and not compared, by a word of `SKIPPED`.
        figures: of the first wrong call.
    """

    op: str
    kernel: str
    checked: int
    wrong: int
    disputed: int
    skipped: dict[str, int]
    figures: str = ""

    def __str__(self) -> str:
        told = f"audited {self.op} {self.kernel}: {self.checked} calls compared, {self.wrong} wrong"
        if self.disputed:
            told += f", {self.disputed} disputed"
        if self.skipped:
            told += ", skipped " + ", ".join(f"{count} ({word})" for word, count in sorted(self.skipped.items()))
        return f"{told}: {self.figures}" if self.figures else told


@dataclass
class _Count:
    checked: int = 0
    wrong: int = 0
    disputed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    figures: str = ""


class _Paused(threading.local):
    now = False


PAUSED = _Paused()


@contextlib.contextmanager
def unaudited() -> Iterator[None]:
    """A block whose calls serve nobody, so that this thread audits none of them: they verify, tune or recompute."""
    before, PAUSED.now = PAUSED.now, True
    try:
        yield
    finally:
        PAUSED.now = before


class Audits:
    """What the audits of this process found since the report began.

    Attributes:
        settle: has results looked at that waited for a device, without waiting for it; None until calls are audited.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], _Count] = {}
        self._guard = threading.Lock()
        self.settle: Any = None

    def renew(self) -> None:
        """After a fork: threads that are not here may have held the lock."""
        self._guard = threading.Lock()

    def note_checked(self, op: str, kernel: str) -> None:
        with self._guard:
            self._of(op, kernel).checked += 1

    def note_wrong(self, op: str, kernel: str, figures: str) -> None:
        with self._guard:
            count = self._of(op, kernel)
            count.wrong += 1
            count.figures = count.figures or figures

    def note_disputed(self, op: str, kernel: str) -> None:
        with self._guard:
            self._of(op, kernel).disputed += 1

    def note_skipped(self, op: str, kernel: str, why: str) -> None:
        with self._guard:
            self._of(op, kernel).skipped[why] += 1

    def _of(self, op: str, kernel: str) -> _Count:
        return self._counts.setdefault((op, kernel), _Count())

    def told(self) -> tuple[Audited, ...]:
        """The counts, one for each kernel of an op; takes no lock."""
        return tuple(
            Audited(op, kernel, one.checked, one.wrong, one.disputed, dict(one.skipped.copy()), one.figures)
            for (op, kernel), one in list(self._counts.items())
        )

    def clear(self) -> None:
        """Count anew."""
        with self._guard:
            self._counts.clear()


AUDITS = Audits()
