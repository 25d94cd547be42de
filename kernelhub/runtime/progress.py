"""Progress of warm-up, long commands and compilers, reported by a thread, also while a compiler runs."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any

from kernelhub.dispatch.work import JOURNAL

EVERY_S = 1.0

_log = logging.getLogger("kernelhub.compile")


@dataclass(frozen=True)
class Beat:
    """The progress of a warm-up.

    Attributes:
        stage: ``"waiting"``, ``"building"``, ``"earning trust"``, ``"verifying"``, ``"compiling"`` (in child
            processes) or ``"making ready"``.
        label: the current item.
        done: items done in this stage.
        total: items of this stage.
        seconds: since the warm-up began.
        stage_seconds: since the stage began.
        budget_s: time limit of the stage in seconds; None without one.
        doing: what this process is compiling, loading or downloading; empty if nothing.
    """

    stage: str
    label: str
    done: int
    total: int
    seconds: float
    stage_seconds: float
    budget_s: float | None = None
    doing: str = ""

    @property
    def budget_left_s(self) -> float | None:
        """Seconds left of the stage's limit."""
        return None if self.budget_s is None else max(0.0, self.budget_s - self.stage_seconds)

    @property
    def remaining_s(self) -> float | None:
        """Estimated seconds for the rest of the stage at the pace so far; None until an item is done."""
        return self.stage_seconds / self.done * (self.total - self.done) if self.done else None

    @property
    def what(self) -> str:
        """The label, and the current work if the label does not name it."""
        named = self.doing.partition(" ")[2] in self.label
        return self.label if named else f"{self.label} ({self.doing})"

    def __str__(self) -> str:
        left = "" if self.remaining_s is None else f", about {self.remaining_s:.0f} s left"
        if self.budget_left_s is not None:
            left = f", {self.budget_left_s:.0f} s of the budget left"
        return f"{self.stage} {self.done}/{self.total}, {self.seconds:.0f} s{left}: {self.what}"


Tell = Callable[[Beat], object]


class Heart:
    """Calls `heartbeat` and `progress` every second from a thread; `progress` also as each item begins.

    An exception in either ends the calls; the next `step` raises it in the working thread.
    """

    def __init__(self, heartbeat: Tell | None, progress: Tell | None) -> None:
        self._tell = [tell for tell in (heartbeat, progress) if tell is not None]
        self._progress = progress
        self._begun = self._stage_begun = time.monotonic()
        self._at: tuple[str, str, int, int] = ("", "", 0, 0)
        self._budget_s: float | None = None
        self._seconds: dict[str, float] = {}
        self._ended = threading.Event()
        self._guard = threading.RLock()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._beat, name="kernelhub warm-up", daemon=True)

    def __enter__(self) -> Heart:
        if self._tell:
            JOURNAL.shown += 1
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._tell:
            self._thread.join()
            JOURNAL.shown -= 1

    def stage(self, name: str, total: int, budget_s: float | None = None) -> None:
        """Begin a stage, of at most `budget_s` seconds if given."""
        self._end_stage()
        self._stage_begun, self._budget_s = time.monotonic(), budget_s
        self._at = (name, "", 0, total)

    @property
    def stages(self) -> tuple[tuple[str, float], ...]:
        """Seconds of each stage so far, in the order of their first begin."""
        self._end_stage()
        self._stage_begun = time.monotonic()
        return tuple(self._seconds.items())

    def _end_stage(self) -> None:
        name = self._at[0]
        if name:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - self._stage_begun

    def step(self, label: str, done: int | None = None, total: int | None = None) -> None:
        """Begin an item, with the number of items done; `total` changes the number of items of the stage."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        stage, _, before, of = self._at
        self._at = (stage, label, before if done is None else done, of if total is None else total)
        if self._progress is not None and done is not None:
            with self._guard:
                self._progress(self.now)

    @property
    def now(self) -> Beat:
        """The current progress."""
        at = time.monotonic()
        doing = ", ".join(JOURNAL.under_way)
        return Beat(*self._at, at - self._begun, at - self._stage_begun, self._budget_s, doing)

    def _beat(self) -> None:
        while True:
            try:
                with self._guard:
                    for tell in self._tell:
                        tell(self.now)
            except BaseException as error:  # from the caller's function: raised in the caller's thread
                self._error = error
                return
            if self._ended.wait(EVERY_S):
                return


@contextlib.contextmanager
def bar(stream: IO[str]) -> Iterator[Tell]:
    """A function that prints each `Beat` on a stream: with rich on a terminal, if rich is installed."""
    progress = _rich(stream)
    if progress is None:
        yield _Lines(stream)
        return
    with progress:
        tasks: dict[str, Any] = {}

        def show(beat: Beat) -> None:
            if not beat.stage:
                return
            if beat.stage not in tasks:
                tasks[beat.stage] = progress.add_task(beat.stage, total=beat.total, label="")
            progress.update(tasks[beat.stage], total=beat.total, completed=beat.done, label=beat.what)

        yield show


class _Lines:
    """A line when an item or a compilation begins, and one every ten seconds while it runs."""

    _again_s = 10.0

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._last: tuple[str, int, str] | None = None
        self._said_s = 0.0

    def __call__(self, beat: Beat) -> None:
        at = (beat.stage, beat.done, beat.doing)
        if beat.stage and (at != self._last or beat.seconds - self._said_s >= self._again_s):
            self._last, self._said_s = at, beat.seconds
            print(beat, file=self._stream, flush=True)


def _rich(stream: IO[str]) -> Any:
    """rich's progress on a terminal; None for a pipe, a file, or if rich is missing or broken."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as Left

        words = (TextColumn("{task.description}"), TextColumn("{task.fields[label]}", markup=False))
        columns = (words[0], BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), Left(), words[1])
        return Progress(*columns, console=Console(file=stream, highlight=False), transient=True)
    except ImportError:
        return None
    except Exception as error:  # calls of ops report compilers here: a broken rich must not end them
        _log.warning("progress is plain, since rich fails: %s: %s", type(error).__name__, error)
        return None


@contextlib.contextmanager
def compiling(what: str) -> Iterator[None]:
    """Report that a call waits for a compiler: as progress on a terminal, else as one log record.

    Work that a warm-up or a command already reports is not reported twice.
    """
    if JOURNAL.shown:
        yield
        return
    _log.info("compiling %s", what)
    if not sys.stderr.isatty():
        yield
        return
    with bar(sys.stderr) as show:
        heart = Heart(None, show)
        heart.stage("compiling", 1)
        heart.step(what, 0)
        with heart:
            yield
