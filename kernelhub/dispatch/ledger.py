"""What was made ready in this process and what gave way: the report is read from it."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

from kernelhub.dispatch.audits import AUDITS
from kernelhub.dispatch.bound import Bound, calls_of
from kernelhub.dispatch.gate import GATE, Caller
from kernelhub.dispatch.load import LoadFailure
from kernelhub.dispatch.problem import as_dict
from kernelhub.dispatch.report import Fallback, Report, Row
from kernelhub.dispatch.selection import Selection
from kernelhub.dispatch.work import JOURNAL

_REASONS = 64  # for one problem; what else was said for it is counted together
_MORE = "asked for in many other ways, counted together"
_WAITING = 4  # ended selections that wait to be added up: a change of what is chosen by does that, seldom a choice


class _Counted(weakref.ref[Bound]):
    """A selection made ready, whose calls are read from its counter.

    Attributes:
        place: how many were made ready before it; -1 where nobody counts it.
        selection: what was selected.
        counter: of its calls.
        adapter: identity of its adapter.
    """

    __slots__ = ("adapter", "counter", "place", "selection")
    place: int
    selection: Selection[Any]
    counter: Any
    adapter: int


@dataclass(eq=False)
class _Met:
    """A problem that was met: the last selection for it, and the calls by kernel, source and reason.

    Attributes:
        place: that of the last selection.
        rows: for each kernel, source and reason, the place of the first selection, and calls.
    """

    place: int
    selection: Selection[Any]
    rows: dict[tuple[str, str, str], tuple[int, int]]


class _Unreported(threading.local):
    now = False


class Ledger:
    """Every selection made ready, and every fall to another kernel.

    It holds no selection itself: one that nothing else holds leaves its count behind, so that a process may configure
    itself anew for as long as it runs.

    Attributes:
        plans: the plans that something still holds.
    """

    def __init__(self) -> None:
        self.plans: weakref.WeakSet[Any] = weakref.WeakSet()
        self._guard = threading.RLock()
        self._unreported = _Unreported()
        self._alive: dict[int, _Counted] = {}  # by the identity of the adapter
        self._ended: deque[_Counted] = deque()  # noted by the garbage collector, which takes no lock
        self._start()

    def _start(self) -> None:
        self._met: dict[tuple[str, Any], _Met] = {}  # of selections that nothing holds any more
        self._counted: dict[int, _Counted] = {}  # by place
        self._place = 0
        self._fallbacks: dict[tuple[str, str, str], Fallback] = {}

    def renew(self) -> None:
        """After a fork: threads that are not here may have held the lock."""
        self._guard = threading.RLock()

    def add(self, bound: Bound) -> None:
        """Note a selection made ready."""
        made = _Counted(bound, self._ended.append)
        made.selection, made.counter, made.adapter = bound.selection, bound.counter, id(bound.adapter)
        with self._guard:
            if len(self._ended) >= _WAITING:
                self._settle()
            self._alive[made.adapter] = made
            if self._unreported.now:
                made.place = -1
                return
            made.place = self._place
            self._counted[made.place] = made
            self._place += 1

    def settle(self) -> None:
        """Let go of selections that nothing else holds any more."""
        with self._guard:
            self._settle()

    def _settle(self) -> None:
        """Add up the calls of selections that nothing holds any more."""
        while self._ended:
            ended = self._ended.popleft()
            if self._alive.get(ended.adapter) is ended:  # its place in memory may be another's by now
                del self._alive[ended.adapter]
            if self._counted.get(ended.place) is ended:
                del self._counted[ended.place]
                _add_up(self._met, ended)

    def _all_met(self) -> dict[tuple[str, Any], _Met]:
        """Every problem that was met since the report began, with the calls up to now."""
        with self._guard:
            self._settle()
            met = {key: replace(one, rows=dict(one.rows)) for key, one in self._met.items()}
            for counted in self._counted.values():
                _add_up(met, counted)
        return met

    def add_fall(self, op: str, kernel: str, failure: LoadFailure) -> bool:
        """Note that a chosen kernel gave way; True if that was not known before."""
        key = (op, kernel, failure.code)
        with self._guard:
            known = self._fallbacks.get(key)
            count = 1 + (known.count if known else 0)
            self._fallbacks[key] = Fallback(op, kernel, failure.code, failure.reason, count)
        return known is None

    def bound_of(self, adapter: Any) -> Bound | None:
        """The selection that an adapter was made for."""
        made = self._alive.get(id(adapter))
        bound = None if made is None else made()
        return bound if bound is not None and bound.adapter is adapter else None

    @property
    def alive(self) -> list[Bound]:
        """Every selection made ready that something still holds, oldest first."""
        return [bound for made in list(self._alive.values()) if (bound := made()) is not None]

    def selections(self) -> list[Selection[Any]]:
        """The last selection on every problem that was met since the report began."""
        met = sorted(self._all_met().values(), key=lambda one: min(first for first, _ in one.rows.values()))
        return [one.selection for one in met]

    def report(self) -> Report:
        """What ran so far; choices made again after a change of configuration are counted together."""
        met = self._all_met()
        rows = [
            (first, Row(op, kernel, calls, source, because, as_dict(problem)))
            for (op, problem), one in met.items()
            for (kernel, source, because), (first, calls) in one.rows.items()
        ]
        rows.sort(key=lambda placed: placed[0])
        on_gpu = any(problem.device.type != "cpu" for _, problem in met)
        if AUDITS.settle is not None:
            AUDITS.settle()
        made, fallbacks = tuple(row for _, row in rows), tuple(self._fallbacks.values())
        return Report(made, fallbacks, JOURNAL.work, GATE.sealed, on_gpu, AUDITS.told())

    @contextlib.contextmanager
    def unreported(self) -> Iterator[None]:
        """A block whose choices neither the report nor an agreement of ranks counts, since nobody is served by them."""
        before, self._unreported.now = self._unreported.now, True
        try:
            yield
        finally:
            self._unreported.now = before

    def forget_report(self) -> None:
        """Start the report anew."""
        with self._guard:
            self._start()
        JOURNAL.clear()
        AUDITS.clear()

    def clear(self) -> None:
        """Forget what something still holds, too."""
        self._alive.clear()
        self.plans.clear()
        self.forget_report()


def _add_up(met: dict[tuple[str, Any], _Met], counted: _Counted) -> None:
    """Add the calls of one selection to those of its problem."""
    selection, place = counted.selection, counted.place
    key = (selection.op, selection.problem)
    one = met.get(key)
    if one is None:
        one = met[key] = _Met(place, selection, {})
    elif place > one.place:
        one.place, one.selection = place, selection
    row = (str(selection.selected), selection.source, selection.because)
    if row not in one.rows and len(one.rows) >= _REASONS:
        row = (*row[:2], _MORE)
    first, calls = one.rows.get(row, (place, 0))
    one.rows[row] = min(first, place), calls + calls_of(counted.counter)


def caller_on_stack(bound_of: Callable[[Any], Bound | None], deciding: CodeType) -> Caller | None:
    """On behalf of which op the calling code works: told by the adapter whose method is on the stack.

    Args:
        bound_of: the selection that an adapter was made for.
        deciding: code whose local variables `op`, `kernel` and `problem` say it while an adapter is being made.
    """
    frame = sys._getframe(1)
    while frame is not None:
        said = frame.f_locals
        if frame.f_code is deciding:
            kernel = said.get("kernel")
            return Caller(said["op"], kernel.name if kernel else "", said["problem"], None, frame)
        for holder in (said.get("self"), said.get("adapter"), getattr(said.get("launch"), "__self__", None)):
            bound = None if holder is None else bound_of(holder)
            if bound is not None:
                selection = bound.selection
                return Caller(selection.op, str(selection.selected), selection.problem, None, frame, bound)
        frame = frame.f_back  # type: ignore[assignment]
    return None
