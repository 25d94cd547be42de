"""Console output: framed and coloured on a terminal if rich is installed, else plain aligned text.

Plain text is for pipes and logs: no colours, no frames, no truncation, one row per line.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from kernelhub.runtime.progress import Heart, bar

if TYPE_CHECKING:
    import rich.console

_MIN_COLUMN = 20  # a column that has to wrap is not made narrower than this

_STYLES = {
    "ok": "green", "yes": "green", "supported": "green", "selected": "bold green", "rejected": "red",
    "note": "yellow", "environment": "yellow",
    "right": "green", "wrong": "bold red", "not run": "yellow",
    "problem": "bold red", "invalid": "bold red", "no": "red", "broken": "red",
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Rows of words under column names; an empty column is not shown."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def shown(self) -> Table:
        """The table without its empty columns."""
        keep = [index for index in range(len(self.columns)) if any(row[index] for row in self.rows)]
        return Table(
            tuple(self.columns[index] for index in keep),
            [tuple(row[index] for index in keep) for row in self.rows],
        )


class Console:
    """Plain text on a stream."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream

    def line(self, text: str = "", *, indent: int = 0) -> None:
        """One line of text."""
        print(" " * indent + text, file=self.stream)

    def heading(self, text: str) -> None:
        """A heading for the lines that follow."""
        self.line(text)

    def table(self, table: Table) -> None:
        """A table, each row on one line."""
        table = table.shown()
        rows = [table.columns, *(tuple(" ".join(cell.split()) for cell in row) for row in table.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            self.line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

    def json(self, value: Any) -> None:
        """A JSON document, the same on a terminal and in a pipe."""
        print(json.dumps(value, indent=2, default=str), file=self.stream)

    def entries(self, rows: Sequence[tuple[str, str]]) -> None:
        """Labels with a sentence each; on a terminal a long sentence wraps in its own column."""
        width = max((len(label) for label, _ in rows), default=0)
        for label, text in rows:
            self._entry(f"{label:<{width}}  ", " ".join(text.split()))

    def _entry(self, label: str, text: str) -> None:
        self.line(f"{label}{text}".rstrip())


class TerminalConsole(Console):
    """The same through rich."""

    def __init__(self, stream: IO[str], terminal: rich.console.Console) -> None:
        super().__init__(stream)
        self._terminal = terminal

    def line(self, text: str = "", *, indent: int = 0) -> None:
        width = max(self._terminal.width - indent, 20)
        for part in textwrap.wrap(text, width, break_on_hyphens=False) or [""]:
            super().line(part, indent=indent)

    def heading(self, text: str) -> None:
        from rich.text import Text

        self._terminal.print(Text(text, style="bold"))

    def table(self, table: Table) -> None:
        import rich.box
        import rich.table
        from rich.text import Text

        table = table.shown()
        widths = fitting(table, self._terminal.width)
        if widths is None:
            self._stack(table)
            return
        framed = rich.table.Table(box=rich.box.ROUNDED, header_style="bold")
        for name, width in zip(table.columns, widths, strict=True):
            framed.add_column(name, overflow="fold", width=width)
        for row in table.rows:
            framed.add_row(*(Text(" ".join(cell.split()), style=_STYLES.get(cell, "")) for cell in row))
        self._terminal.print(framed)

    def _stack(self, table: Table) -> None:
        """A row over several lines: its first cell, then each other cell with its column's name."""
        width = max(map(len, table.columns[1:]), default=0)
        for first, *rest in table.rows:
            self.heading(first)
            for name, cell in zip(table.columns[1:], rest, strict=True):
                if cell:
                    self._entry(f"  {name:<{width}}  ", " ".join(cell.split()))

    def _entry(self, label: str, text: str) -> None:
        width = self._terminal.width
        hanging = " " * min(len(label), max(width - _MIN_COLUMN, 0))
        made = textwrap.wrap(label + text, width, subsequent_indent=hanging, break_on_hyphens=False)
        for part in made:
            super().line(part)


def fitting(table: Table, width: int) -> list[int] | None:
    """Widths of a framed table's columns, so that it fits; None if one would have to wrap below 20 characters."""
    natural = [
        max(len(" ".join(cell.split())) for cell in (name, *(row[index] for row in table.rows)))
        for index, name in enumerate(table.columns)
    ]
    widths = list(natural)
    available = width - 3 * len(widths) - 1
    while sum(widths) > available:
        widest = max(range(len(widths)), key=widths.__getitem__)
        if widths[widest] <= _MIN_COLUMN:
            return None
        others = max((item for item in widths if item < widths[widest]), default=0)
        excess = sum(widths) - available
        widths[widest] = max(_MIN_COLUMN, widths[widest] - max(1, min(excess, widths[widest] - others)))
    return widths


def console_for(stream: IO[str]) -> Console:
    """The console for a stream: framed if it is a terminal and rich is installed."""
    terminal = _terminal(stream)
    return Console(stream) if terminal is None else TerminalConsole(stream, terminal)


@contextlib.contextmanager
def steps(stage: str, total: int, stream: IO[str]) -> Iterator[Callable[[str], None]]:
    """Progress of a long command with the time left: a bar on a terminal, else a line for each step.

    Yields:
        A function to call with a description as each of the `total` steps begins.
    """
    with bar(stream) as show, Heart(None, show) as heart:
        begun = 0

        def step(text: str) -> None:
            nonlocal begun
            if not begun:
                heart.stage(stage, total)
            heart.step(text, begun)
            begun += 1

        yield step


@contextlib.contextmanager
def alone_on_stdout() -> Iterator[IO[str]]:
    """Standard output for the caller alone; what Python, C and child processes print there goes to standard error."""
    stdout, stderr = sys.stdout, sys.stderr
    try:
        number, elsewhere = stdout.fileno(), stderr.fileno()
    except (OSError, ValueError, io.UnsupportedOperation):  # replaced by a stream in memory, as notebooks do
        with contextlib.redirect_stdout(stderr):
            yield stdout
        return
    stdout.flush()
    kept = os.dup(number)
    os.dup2(elsewhere, number)
    try:
        with (
            contextlib.redirect_stdout(stderr),
            os.fdopen(os.dup(kept), "w", encoding=stdout.encoding, errors=stdout.errors) as stream,
        ):
            yield stream
    finally:
        stderr.flush()
        ctypes.CDLL(None).fflush(None)  # otherwise C's buffered output would follow the document
        os.dup2(kept, number)
        os.close(kept)


def _terminal(stream: IO[str]) -> rich.console.Console | None:
    """rich's console on a terminal; None for a pipe, a file, or if rich is missing or broken."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console as RichConsole

        return RichConsole(file=stream, highlight=False)
    except ImportError:
        return None
    except Exception as error:  # a broken rich decorates nothing, but it must not end a command
        print(f"kernelhub: the output is plain, since rich fails: {type(error).__name__}: {error}", file=sys.stderr)
        return None
