"""Output for people: framed and coloured on a terminal if rich is installed, else plain aligned text.

Plain text is for pipes and logs: no colours, no frames, nothing cut off, a row a line.
"""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import rich.console

_STYLES = {
    "ok": "green", "yes": "green", "able": "green", "runs": "bold green",
    "note": "yellow", "environment": "yellow",
    "right": "green", "wrong": "bold red", "not run": "yellow",
    "problem": "bold red", "invalid": "bold red", "no": "red", "broken": "red",
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Rows of words under column names; a column without a word in it is not shown."""

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
        """A line that what follows belongs to."""
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
        framed = rich.table.Table(box=rich.box.ROUNDED, header_style="bold")
        for index, name in enumerate(table.columns):
            framed.add_column(name, overflow="fold", no_wrap=index == 0)
        for row in table.rows:
            framed.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
        self._terminal.print(framed)


def console_for(stream: IO[str]) -> Console:
    """The console that fits a stream: framed where it is a terminal and rich is installed."""
    terminal = _terminal(stream)
    return Console(stream) if terminal is None else TerminalConsole(stream, terminal)


@contextlib.contextmanager
def steps(total: int, stream: IO[str]) -> Iterator[Callable[[str], None]]:
    """Tell how far a long command is: a bar on a terminal, else a line for each step.

    Yields:
        A function to call as each of the `total` steps begins, with what it does.
    """
    terminal = _terminal(stream)
    if terminal is None:
        yield _plain_step(total, stream)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=terminal, transient=True) as bar:
        task = bar.add_task("", total=total)
        begun = 0

        def step(text: str) -> None:
            nonlocal begun
            bar.update(task, description=text, completed=begun)
            begun += 1

        yield step


def _plain_step(total: int, stream: IO[str]) -> Callable[[str], None]:
    begun = 0

    def step(text: str) -> None:
        nonlocal begun
        begun += 1
        print(f"step {begun}/{total}: {text}", file=stream, flush=True)

    return step


def _terminal(stream: IO[str]) -> rich.console.Console | None:
    """rich's console on a terminal; None for a pipe, a file, or where rich is missing."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console as RichConsole
    except ImportError:
        return None
    return RichConsole(file=stream, highlight=False)
