"""The ledger: every bound selection of this process with its calls, and every fallback.

`report()` is made from it. It also finds the op and kernel on whose behalf code on the stack works.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import TYPE_CHECKING, Any

from kernelhub.dispatch.audits import AUDITS
from kernelhub.dispatch.bound import Bound, calls_of
from kernelhub.dispatch.gate import GATE, Caller
from kernelhub.dispatch.load import LoadFailure
from kernelhub.dispatch.problem import as_dict
from kernelhub.dispatch.selection import Selection
from kernelhub.dispatch.work import JOURNAL

if TYPE_CHECKING:
    from kernelhub.dispatch.report import Fallback, Report

_REASONS = 64  # rows of one problem; calls of further reasons share a row
_MORE = "requested in many other ways, counted together"
_WAITING = 4  # ended selections before they are added up: a change of settings does that, a new selection seldom


class _Counted(weakref.ref[Bound]):
    """A weak reference to a bound selection, with what the report needs after the selection ended.

    Attributes:
        place: number of selections bound before it; -1 if the report does not count it.
        selection: the selection.
        counter: counter of its calls.
        adapter: `id` of its adapter.
        parts: bound selections of the ops that its kernel is made of, to which each of its calls belongs, too.
    """

    __slots__ = ("adapter", "counter", "parts", "place", "selection")
    place: int
    selection: Selection[Any]
    counter: Any
    adapter: int
    parts: Sequence[Bound]


@dataclass(eq=False)
class _Met:
    """A problem with its last selection, and its calls by kernel, source and reason.

    Attributes:
        place: place of the last selection.
        selection: the last selection.
        rows: by kernel, source and reason: place of the first selection, and number of calls.
    """

    place: int
    selection: Selection[Any]
    rows: dict[tuple[str, str, str], tuple[int, int]]


class _Unreported(threading.local):
    now = False


class Ledger:
    """Every bound selection and every fallback of the process.

    It refers to bound selections weakly, and keeps the counts of those that ended. So memory does not grow when a
    process changes its configuration again and again.

    Attributes:
        plans: all live plans, as weak references.
    """

    def __init__(self) -> None:
        self.plans: weakref.WeakSet[Any] = weakref.WeakSet()
        self._guard = threading.RLock()
        self._unreported = _Unreported()
        self._alive: dict[int, _Counted] = {}  # by the identity of the adapter
        self._ended: deque[_Counted] = deque()  # appended by the garbage collector, which takes no lock
        self._start()

    def _start(self) -> None:
        self._met: dict[tuple[str, Any], _Met] = {}  # of selections that ended
        self._counted: dict[int, _Counted] = {}  # by place
        self._place = 0
        self._fallbacks: dict[tuple[str, str, str], Fallback] = {}

    def renew(self) -> None:
        """Replace the lock after a fork: a thread of the parent may have held it."""
        self._guard = threading.RLock()

    def add(self, bound: Bound) -> None:
        """Add a bound selection."""
        made = _Counted(bound, self._ended.append)
        made.selection, made.counter, made.adapter = bound.selection, bound.counter, id(bound.adapter)
        made.parts = getattr(bound.adapter, "part_bounds", ())
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
        """Add up the calls of selections that ended, and drop them."""
        with self._guard:
            self._settle()

    def _settle(self) -> None:
        """`settle` for a caller that holds the lock."""
        while self._ended:
            ended = self._ended.popleft()
            if self._alive.get(ended.adapter) is ended:  # another adapter may have its `id` by now
                del self._alive[ended.adapter]
            if self._counted.get(ended.place) is ended:
                del self._counted[ended.place]
                _add_up(self._met, ended)

    def _all_met(self) -> dict[tuple[str, Any], _Met]:
        """Every problem since the report was last cleared, with its calls so far."""
        with self._guard:
            self._settle()
            met = {key: replace(one, rows=dict(one.rows)) for key, one in self._met.items()}
            for counted in self._counted.values():
                _add_up(met, counted)
        return met

    def add_fallback(self, op: str, kernel: str, failure: LoadFailure) -> bool:
        """Count a fallback from a selected kernel; True if it is the first of its kind."""
        from kernelhub.dispatch.report import Fallback

        key = (op, kernel, failure.code)
        with self._guard:
            known = self._fallbacks.get(key)
            count = 1 + (known.count if known else 0)
            self._fallbacks[key] = Fallback(op, kernel, failure.code, failure.reason, count)
        return known is None

    def bound_of(self, adapter: Any) -> Bound | None:
        """The bound selection of an adapter; None if there is none."""
        made = self._alive.get(id(adapter))
        bound = None if made is None else made()
        return bound if bound is not None and bound.adapter is adapter else None

    @property
    def alive(self) -> list[Bound]:
        """Every live bound selection, oldest first."""
        return [bound for made in list(self._alive.values()) if (bound := made()) is not None]

    def selections(self) -> list[Selection[Any]]:
        """The last selection for each problem since the report was last cleared."""
        met = sorted(self._all_met().values(), key=lambda one: min(first for first, _ in one.rows.values()))
        return [one.selection for one in met]

    def report(self) -> Report:
        """The report. Repeated selections of the same problem with the same result share a row."""
        from kernelhub.dispatch.report import Report, Row

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
        return Report(made, fallbacks, JOURNAL.work, GATE.sealed, on_gpu, AUDITS.counts())

    @contextlib.contextmanager
    def unreported(self) -> Iterator[None]:
        """A block whose selections are left out of reports and of agreements of ranks, since they serve no user."""
        before, self._unreported.now = self._unreported.now, True
        try:
            yield
        finally:
            self._unreported.now = before

    def forget_report(self) -> None:
        """Clear the report."""
        with self._guard:
            self._start()
        JOURNAL.clear()
        AUDITS.clear()

    def clear(self) -> None:
        """Clear the report, and drop live selections and plans from the ledger."""
        self._alive.clear()
        self.plans.clear()
        self.forget_report()


def _add_up(met: dict[tuple[str, Any], _Met], counted: _Counted) -> None:
    """Add the calls of one selection to those of its problem, and to those of its parts."""
    calls = calls_of(counted.counter)
    for selection in (counted.selection, *(part.selection for part in counted.parts)):
        _add(met, selection, counted.place, calls)


def _add(met: dict[tuple[str, Any], _Met], selection: Selection[Any], place: int, more: int) -> None:
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
    one.rows[row] = min(first, place), calls + more


def caller_on_stack(bound_of: Callable[[Any], Bound | None], binding: CodeType) -> Caller | None:
    """The op and kernel on whose behalf the calling code works, found by the adapter on the stack, or None.

    Args:
        bound_of: returns the bound selection of an adapter.
        binding: code of `Hub.bind`, whose local variables `op`, `kernel` and `problem` are read while an adapter is
            being made.
    """
    frame = sys._getframe(1)
    while frame is not None:
        local = frame.f_locals
        if frame.f_code is binding:
            kernel = local.get("kernel")
            return Caller(local["op"], kernel.name if kernel else "", local["problem"], None, frame)
        for holder in (local.get("self"), local.get("adapter"), getattr(local.get("launch"), "__self__", None)):
            bound = None if holder is None else bound_of(holder)
            if bound is not None:
                selection = bound.selection
                return Caller(selection.op, str(selection.selected), selection.problem, None, frame, bound)
        frame = frame.f_back  # type: ignore[assignment]
    return None
