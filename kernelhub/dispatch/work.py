"""What a process did besides launching: compiled, loaded, downloaded, tuned, packed; counted, and refused once sealed.

Backends tell of it: ours themselves, and those of libraries through a `watch` in their folder, which hooks the library
once it is imported.
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

_KEPT = 4096  # pieces of work that are kept one by one; all are counted


@dataclass(frozen=True)
class Work:
    """One piece of work.

    Attributes:
        kind: ``"compile"``, ``"load"``, ``"download"``, ``"tune"`` or ``"pack"``.
        what: the name of what was made.
        by: who made it, e.g. ``"triton"``.
        seconds: how long it took.
        op: the op on whose behalf, or None for work that is not kernelhub's.
        kernel: the kernel on whose behalf; empty if none was chosen yet.
        site: ``file:line`` of the code outside kernelhub that asked.
        sealed: whether it was done after `seal`, which only foreign work can be.
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
    """Work that is being done.

    Attributes:
        kind: as of `Work`.
    """

    kind: str


class _Swallowed(threading.local):
    refusal: KernelhubError | None = None


class Journal:
    """The work of this process.

    Attributes:
        caller: finds on whose behalf the calling code works; None if on nobody's.
        count: pieces of work done.
        under_way: the work that is being done now, as phrases.
        shown: how many displays of progress show `under_way`.
        compile_timeout_s: longest run of a compiler that a backend starts; KERNELHUB_COMPILE_TIMEOUT_S.
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
        """What was done, oldest first; of very much the last."""
        return tuple(self._work)

    @contextlib.contextmanager
    def doing(
        self, kind: str, what: str, by: str, *, caller: Caller | None = None, swallows: bool = False
    ) -> Iterator[Doing]:
        """Do work inside the block, unless it is refused; what is given may be told another kind when it is known.

        Args:
            kind: as of `Work`.
            what: as of `Work`.
            by: as of `Work`.
            caller: on whose behalf; by default as the stack tells.
            swallows: whether the code around loses exceptions, as foreign callbacks do; the launch finds it again.

        Raises:
            NotWarmed: the process is sealed, and this is done on behalf of an op.
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
        """Remember what was done."""
        op, kernel = (None, "") if caller is None else (caller.op, caller.kernel)
        self.count += 1
        self._work.append(Work(kind, what, by, seconds, op, kernel, _site(), GATE.sealed))

    def swallowed(self) -> KernelhubError | None:
        """The refusal that foreign code lost in this thread, once."""
        refusal, self._swallowed.refusal = self._swallowed.refusal, None
        return refusal

    def clear(self) -> None:
        """Start anew."""
        self.count = 0
        self._work.clear()
        self._swallowed.refusal = None


def _site() -> str:
    """The nearest code that is neither kernelhub's nor that of a library under it: the last frame before kernelhub."""
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
