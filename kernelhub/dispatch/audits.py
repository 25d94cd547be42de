"""Settings and counts of audits: calls that are recomputed in service (`KERNELHUB_AUDIT`).

`kernelhub.evidence.audit` recomputes them. It is not imported while the share is 0.
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
    """Which calls are audited, and what happens to a wrong kernel.

    Attributes:
        share: share of the calls, from 0 (none) to 1 (all).
        num_bytes: maximum memory for copies and recomputing at one time.
        action: ``"record"``: a wrong kernel is quarantined for the next process; ``"quarantine"``: immediately.
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
    "pending": "the maximum number of calls already waits for the device",
    "capture": "it was captured in a CUDA graph, or ran in the memory pool of one",
    "lost": "the device is lost",
    "packed": "its weight is packed for the kernel, and the original weight is not available",
    "collective": "its reference communicates with the other ranks",
    "no_numbers": "where the result differs, the reference is NaN or outside the range of the result's dtype",
    "failed": "recomputing it raised an error",
    "unread": "its launch has an argument that the audit does not support",
}


@dataclass(frozen=True)
class Audited:
    """Counts of the audits of one kernel of one op.

    Attributes:
        op: name of the op.
        kernel: name of the kernel.
        checked: compared calls.
        wrong: compared calls with wrong numbers.
        disputed: compared calls for which another kernel gives other numbers and the reference is inconclusive.
        skipped: sampled calls that were not compared, by key of `SKIPPED`.
        figures: errors of the first wrong call; empty if there is none.
    """

    op: str
    kernel: str
    checked: int
    wrong: int
    disputed: int
    skipped: dict[str, int]
    figures: str = ""

    def __str__(self) -> str:
        text = f"audited {self.op} {self.kernel}: {self.checked} calls compared, {self.wrong} wrong"
        if self.disputed:
            text += f", {self.disputed} disputed"
        if self.skipped:
            text += ", skipped " + ", ".join(f"{count} ({word})" for word, count in sorted(self.skipped.items()))
        return f"{text}: {self.figures}" if self.figures else text


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
    """A block in which this thread audits no call, because its calls verify, tune or recompute."""
    before, PAUSED.now = PAUSED.now, True
    try:
        yield
    finally:
        PAUSED.now = before


class Audits:
    """Counts of all audits of this process since the report was last cleared.

    Attributes:
        settle: function that compares the results which the device has finished, without waiting for others; None
            until a call is audited.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], _Count] = {}
        self._guard = threading.Lock()
        self.settle: Any = None

    def renew(self) -> None:
        """Replace the lock after a fork: a thread of the parent may have held it."""
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

    def counts(self) -> tuple[Audited, ...]:
        """The counts, one for each op and kernel. Does not take the lock."""
        return tuple(
            Audited(op, kernel, one.checked, one.wrong, one.disputed, dict(one.skipped.copy()), one.figures)
            for (op, kernel), one in list(self._counts.items())
        )

    def clear(self) -> None:
        """Reset all counts."""
        with self._guard:
            self._counts.clear()


AUDITS = Audits()
