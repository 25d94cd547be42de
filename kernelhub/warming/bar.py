"""Progress output: a bar with the time left on a terminal, else a line per item."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import IO, Any

from kernelhub.warming.beat import Beat, Tell


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
    """rich's progress on a terminal; None for a pipe, a file, or if rich is missing."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as Left
    except ImportError:
        return None
    words = (TextColumn("{task.description}"), TextColumn("{task.fields[label]}", markup=False))
    columns = (words[0], BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), Left(), words[1])
    return Progress(*columns, console=Console(file=stream, highlight=False), transient=True)
