"""The journal of work other than launches: compiling, loading, downloading, tuning, packing.

Work is counted, and refused on behalf of a call once the process is sealed. kernelhub's backends report their own work;
a `watch` module in a backend's folder hooks its library after the import and reports the library's work.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kernelhub.dispatch.gate import GATE, Caller
from kernelhub.errors import KernelhubError

_KEPT = 4096  # pieces of work that are stored; all are counted


@dataclass(frozen=True)
class Work:
    """One piece of work.

    Attributes:
        kind: ``"compile"``, ``"load"``, ``"download"``, ``"tune"`` or ``"pack"``.
        what: name of the result, e.g. of a compiled kernel.
        by: library that did the work, e.g. ``"triton"``.
        seconds: duration.
        op: op whose call caused the work; None for work that kernelhub did not cause.
        kernel: kernel whose call caused the work; empty if none was selected yet.
        site: ``file:line`` of the caller outside kernelhub.
        sealed: whether the work was done after `seal`; only work that kernelhub did not cause can be.
    """

    kind: str
    what: str
    by: str
    seconds: float
    op: str | None
    kernel: str
    site: str
    sealed: bool


@dataclass
class Doing:
    """Work in progress.

    Attributes:
        kind: as in `Work`; may be changed until the work ends.
    """

    kind: str


class _Swallowed(threading.local):
    refusal: KernelhubError | None = None


class Journal:
    """The work of this process; `JOURNAL` is the only instance.

    Attributes:
        caller: returns the call of kernelhub that the current code works for, or None.
        count: number of pieces of work done.
        under_way: the work in progress, as phrases.
        shown: number of progress displays that show `under_way`.
        compile_timeout_s: longest run of a compiler that a backend starts (KERNELHUB_COMPILE_TIMEOUT_S).
    """

    compile_timeout_s = 300.0

    def __init__(self) -> None:
        self.caller: Callable[[], Caller | None] = lambda: None
        self.count = 0
        self.under_way: list[str] = []
        self.shown = 0
        self._work: deque[Work] = deque(maxlen=_KEPT)
        self._swallowed = _Swallowed()

    @property
    def work(self) -> tuple[Work, ...]:
        """The most recent pieces of work, oldest first; at most 4096."""
        return tuple(self._work)

    @contextlib.contextmanager
    def doing(
        self, kind: str, what: str, by: str, *, caller: Caller | None = None, swallows: bool = False
    ) -> Iterator[Doing]:
        """A block that does work, unless it is refused. The yielded `Doing` may get another `kind` inside the block.

        Args:
            kind: as in `Work`.
            what: as in `Work`.
            by: as in `Work`.
            caller: the call that causes the work; by default found on the stack.
            swallows: whether the surrounding code loses exceptions, as foreign callbacks do. The launch then raises
                the refusal again.

        Raises:
            NotWarmed: the process is sealed, and a call of kernelhub causes the work.
        """
        caller = caller or self.caller()
        self.allow(kind, what, caller, swallows=swallows)
        start, doing, phrase = time.perf_counter(), Doing(kind), f"{kind} {what}"
        self.under_way.append(phrase)
        try:
            yield doing
        finally:
            self.under_way.remove(phrase)
            self.note(doing.kind, what, by, time.perf_counter() - start, caller)

    def allow(self, kind: str, what: str, caller: Caller | None, *, swallows: bool = False) -> None:
        """Raise `NotWarmed` if work on behalf of `caller` is refused."""
        if GATE.refuse is None or caller is None:
            return
        refusal = GATE.refuse(kind, what, caller)
        if swallows:
            self._swallowed.refusal = refusal
        raise refusal

    def note(self, kind: str, what: str, by: str, seconds: float, caller: Caller | None) -> None:
        """Store a piece of work."""
        op, kernel = (None, "") if caller is None else (caller.op, caller.kernel)
        self.count += 1
        self._work.append(Work(kind, what, by, seconds, op, kernel, _site(), GATE.sealed))

    def swallowed(self) -> KernelhubError | None:
        """The refusal that foreign code lost in this thread, or None; a second call returns None."""
        refusal, self._swallowed.refusal = self._swallowed.refusal, None
        return refusal

    def clear(self) -> None:
        """Drop all work."""
        self.count = 0
        self._work.clear()
        self._swallowed.refusal = None


def _site() -> str:
    """``file:line`` of the outermost frame that calls into kernelhub; empty if there is none."""
    frame: Any = sys._getframe(1)
    last, seen = "", False
    while frame is not None:
        ours = str(frame.f_globals.get("__name__", "")).partition(".")[0] == "kernelhub"
        if seen and not ours:
            last, seen = f"{frame.f_code.co_filename}:{frame.f_lineno}", False
        seen = seen or ours
        frame = frame.f_back
    return last


JOURNAL = Journal()
