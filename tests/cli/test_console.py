"""Output: framed on a terminal, plain in a pipe, and the same facts in both."""

from __future__ import annotations

import io
import re
import sys
import threading

import pytest

from kernelhub.cli.console import Console, Table, TerminalConsole, console_for, steps
from kernelhub.cli.main import main
from kernelhub.dispatch.work import JOURNAL

LONG = "a reason of many words " * 30
TABLE = Table(("kernel", "selection", "remedy"), [("torch.sdpa", "selected", ""), ("triton.prefill", "rejected", LONG)])


class Terminal(io.StringIO):
    """A stream that claims to be a terminal of 100 columns."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


@pytest.fixture
def without_rich(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)


@pytest.fixture(params=["raise RuntimeError('sunk')", "class Console: pass"], ids=["import", "console"])
def broken_rich(request, monkeypatch, tmp_path):
    """A rich whose import fails, or whose console takes no stream."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").touch()
    (tmp_path / "rich" / "console.py").write_text(request.param)
    names = ("BarColumn", "MofNCompleteColumn", "Progress", "TextColumn", "TimeElapsedColumn", "TimeRemainingColumn")
    (tmp_path / "rich" / "progress.py").write_text(
        "class Any:\n    def __init__(self, *args, **named): pass\n" + "".join(f"{name} = Any\n" for name in names)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        del sys.modules[name]


class TestPlain:
    def test_a_row_is_a_line_however_long(self):
        stream = io.StringIO()
        Console(stream).table(TABLE)
        header, first, second = stream.getvalue().splitlines()
        assert header.split() == ["kernel", "selection", "remedy"]
        assert first.split() == ["torch.sdpa", "selected"]
        assert LONG.strip() in second

    def test_columns_are_aligned(self):
        stream = io.StringIO()
        Console(stream).table(TABLE)
        header, first, second = stream.getvalue().splitlines()
        assert header.index("selection") == first.index("selected") == second.index("rejected")

    def test_a_column_without_a_word_is_left_out(self):
        stream = io.StringIO()
        Console(stream).table(Table(("kernel", "remedy"), [("torch.sdpa", "")]))
        assert "remedy" not in stream.getvalue()

    def test_a_reason_of_several_lines_stays_in_its_row(self):
        stream = io.StringIO()
        Console(stream).table(Table(("kernel", "reason"), [("a.b", "first\nsecond\tthird")]))
        assert stream.getvalue().splitlines()[1] == "a.b     first second third"


class TestOnATerminal:
    def test_tables_are_framed_and_coloured(self, terminal):
        console_for(terminal).table(TABLE)
        text = terminal.getvalue()
        assert "╭" in text
        assert "\x1b[" in text

    def test_long_words_are_wrapped_and_not_cut(self, terminal):
        console_for(terminal).table(TABLE)
        assert terminal.getvalue().count("reason") == LONG.count("reason")
        assert "…" not in terminal.getvalue()

    @pytest.mark.parametrize("width", [30, 40, 80, 120, 200])
    def test_no_column_is_made_narrower_than_20_characters_and_nothing_is_wider_than_the_terminal(
        self, terminal, monkeypatch, width
    ):
        monkeypatch.setenv("COLUMNS", str(width))
        words = ("a reason of many words " * 8).strip()
        rows = [("flashinfer.fa2_prefill", "rejected", words, words), ("torch.sdpa", "selected", words, words)]
        console_for(terminal).table(Table(("kernel", "selection", "reason", "remedy"), rows))
        lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()
        assert max(map(len, lines)) <= width
        told = " ".join(" ".join(lines).replace("│", " ").split())
        assert told.count("reason") >= 4 * 8
        if "╭" in lines[0]:
            widths = [len(part) - 2 for part in lines[0].strip("╭╮").split("┬")]
            assert all(len(cell) <= width or width >= 20 for width, cell in zip(widths, rows[0], strict=True))

    def test_brackets_are_not_markup(self, terminal):
        console_for(terminal).table(Table(("grammar",), [("[op=]name[,name]",)]))
        assert "[op=]name[,name]" in terminal.getvalue()

    def test_json_is_not_framed(self, terminal):
        console_for(terminal).json({"a": [1]})
        assert terminal.getvalue() == '{\n  "a": [\n    1\n  ]\n}\n'

    def test_without_rich_it_is_plain(self, terminal, without_rich):
        console = console_for(terminal)
        assert not isinstance(console, TerminalConsole)
        console.table(TABLE)
        assert "\x1b" not in terminal.getvalue()
        assert LONG.strip() in terminal.getvalue()

    def test_with_a_broken_rich_it_is_plain_and_says_why(self, terminal, broken_rich, capsys):
        console = console_for(terminal)
        console.table(TABLE)
        assert LONG.strip() in terminal.getvalue()
        assert "kernelhub: the output is plain, since rich fails: " in capsys.readouterr().err

    def test_a_whole_command_is(self, terminal, monkeypatch):
        monkeypatch.setattr(sys, "stdout", terminal)
        assert main(["explain", "attention", "--device", "H200"]) == 0
        assert "╭" in terminal.getvalue()
        assert "attention on NVIDIA H200" in terminal.getvalue()


class TestProgress:
    def test_in_a_pipe_each_step_is_a_line(self):
        stream = io.StringIO()
        with steps("demo", 2, stream) as step:
            step("draw")
            step("run")
        first, second = stream.getvalue().splitlines()
        assert first == "demo 0/2, 0 s: draw"
        assert re.fullmatch(r"demo 1/2, 0 s, about \d+ s left: run", second)

    def test_on_a_terminal_it_is_a_bar_that_goes_away(self, terminal):
        with steps("demo", 2, terminal) as step:
            step("draw")
            step("run")
        assert "demo 0/2" not in terminal.getvalue()
        assert "2/2" not in terminal.getvalue().splitlines()[-1]

    def test_on_a_terminal_without_rich_each_step_is_a_line(self, terminal, without_rich):
        with steps("demo", 1, terminal) as step:
            step("draw")
        assert terminal.getvalue() == "demo 0/1, 0 s: draw\n"

    def test_with_a_broken_rich_each_step_is_a_line(self, terminal, broken_rich, caplog):
        with steps("demo", 1, terminal) as step:
            step("draw")
        assert terminal.getvalue() == "demo 0/1, 0 s: draw\n"
        assert "progress is plain, since rich fails" in caplog.text


def test_progress_says_what_is_being_compiled():
    said = threading.Event()

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            if "timing 0/1" in text and "experts (compile experts.cpp)" in text:
                said.set()
            return super().write(text)

    with steps("timing", 1, Stream()) as step:
        step("experts")
        with JOURNAL.doing("compile", "experts.cpp", "cpp"):
            assert said.wait(30)
    assert JOURNAL.under_way == []
