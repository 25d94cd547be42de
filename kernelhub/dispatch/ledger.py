"""What was made ready in this process and what gave way: the report is read from it."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.gate import GATE, Caller
from kernelhub.dispatch.load import LoadFailure
from kernelhub.dispatch.problem import as_dict
from kernelhub.dispatch.report import Fallback, Report, Row
from kernelhub.dispatch.selection import Selection
from kernelhub.dispatch.work import JOURNAL


class Ledger:
    """Every selection made ready, and every fall to another kernel.

    Attributes:
        plans: the plans that something still holds.
    """

    def __init__(self) -> None:
        self.plans: weakref.WeakSet[Any] = weakref.WeakSet()
        self._bound: list[Bound] = []
        self._alive: weakref.WeakValueDictionary[int, Bound] = weakref.WeakValueDictionary()
        self._fallbacks: dict[tuple[str, str, str], Fallback] = {}

    def add(self, bound: Bound) -> None:
        """Note a selection made ready."""
        self._bound.append(bound)
        self._alive[id(bound.adapter)] = bound

    def add_fall(self, op: str, kernel: str, failure: LoadFailure) -> bool:
        """Note that a chosen kernel gave way; True if that was not known before."""
        key = (op, kernel, failure.code)
        known = self._fallbacks.get(key)
        self._fallbacks[key] = Fallback(op, kernel, failure.code, failure.reason, 1 + (known.count if known else 0))
        return known is None

    def bound_of(self, adapter: Any) -> Bound | None:
        """The selection that an adapter was made for."""
        bound = self._alive.get(id(adapter))
        return bound if bound is not None and bound.adapter is adapter else None

    @property
    def alive(self) -> list[Bound]:
        """Every selection made ready that something still holds, oldest first."""
        return list(self._alive.values())

    def verdicts(self) -> list[Selection[Any]]:
        """The last verdict on every problem that was met since the report began."""
        return list({(bound.selection.op, bound.selection.problem): bound.selection for bound in self._bound}.values())

    def report(self) -> Report:
        """What ran so far; choices made again after a change of configuration are counted together."""
        calls: dict[Any, int] = {}
        for bound in self._bound:
            verdict = bound.selection
            key = (verdict.op, verdict.selected, verdict.source, verdict.because, verdict.problem)
            calls[key] = calls.get(key, 0) + bound.calls
        rows = [
            Row(op, kernel, count, source, because, as_dict(problem))
            for (op, kernel, source, because, problem), count in calls.items()
        ]
        return Report(tuple(rows), tuple(self._fallbacks.values()), JOURNAL.work, GATE.sealed)

    @contextlib.contextmanager
    def unreported(self) -> Iterator[None]:
        """A block whose choices neither the report nor an agreement of ranks counts, since nobody is served by them."""
        before = len(self._bound)
        try:
            yield
        finally:
            del self._bound[before:]

    def forget_report(self) -> None:
        """Start the report anew."""
        self._bound.clear()
        self._fallbacks.clear()
        JOURNAL.clear()

    def clear(self) -> None:
        """Forget what something still holds, too."""
        self._alive.clear()
        self.plans.clear()
        self.forget_report()


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
                verdict = bound.selection
                return Caller(verdict.op, str(verdict.selected), verdict.problem, None, frame, bound)
        frame = frame.f_back  # type: ignore[assignment]
    return None
