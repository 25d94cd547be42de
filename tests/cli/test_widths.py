"""What commands print that run no kernel: on terminals of 80, 120 and 200 columns, and in a pipe."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from kernelhub.cli import console
from kernelhub.cli.main import main

ASKED = (
    "help",
    "help explain",
    "backends",
    "backends --all",
    "backends --matrix",
    "backends --op attention",
    "cache check",
    "cache list",
    "doctor",
    "doctor --all",
    "env",
    "env --all",
    "explain attention --device H200",
    "explain attention --device H200 --all",
    "explain attention --device CPU --backend flashinfer",
    "explain paged_attention --device B200 --model llama-3.1-8b",
    "explain fused_moe --device MI300X --model mixtral-8x7b",
    "info triton.split_kv",
    "lock --model llama-3.1-8b --device H200 --out FOLDER/lock.json",
    "lock --check FOLDER/lock.json --device H200 --with triton=3.5.0",
    "replay",
    "warmup --model llama-3.1-8b --device H200 --list",
)
WIDTHS = (80, 120, 200)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("widths")


@pytest.fixture
def printed(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """What a command prints to a stream, with the words on standard error, for a width of terminals."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(folder / "cache"))
    if not (folder / "lock.json").exists():
        assert main(["lock", "--model", "llama-3.1-8b", "--device", "H200", "--out", str(folder / "lock.json")]) == 0

    def run(words: str, stream: io.StringIO, width: int) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(sys, "stdout", stream)
        forced = ["--force"] if "--out" in words else []
        code = main([*words.replace("FOLDER", str(folder)).split(), *forced])
        assert code in (0, 1), words
        return re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())

    return run


@pytest.mark.xdist_group("widths")
class TestWidths:
    @pytest.mark.parametrize("width", WIDTHS)
    @pytest.mark.parametrize("words", ASKED)
    def test_no_line_is_wider_than_the_terminal_and_no_wrapped_column_narrower_than_20(
        self, words, width, printed, monkeypatch
    ) -> None:
        tables = []

        def fitting(table: console.Table, available: int) -> list[int] | None:
            tables.append((table, made := fit(table, available)))
            return made

        fit = console.fitting
        monkeypatch.setattr(console, "fitting", fitting)
        lines = printed(words, Terminal(), width).splitlines()
        assert lines
        longest = max(lines, key=len)
        assert len(longest) <= width or " " not in longest.strip(), longest
        for table, widths in tables:
            for at, made in enumerate(widths or ()):
                natural = max(len(" ".join(row[at].split())) for row in (table.columns, *table.rows))
                assert made >= min(natural, 20), (table.columns[at], made)

    @pytest.mark.parametrize("words", ASKED)
    def test_in_a_pipe_no_line_depends_on_a_width(self, words, printed) -> None:
        wide, narrow = (printed(words, io.StringIO(), width) for width in (200, 40))
        assert re.sub(r"\d", "", wide) == re.sub(r"\d", "", narrow)
        assert "\x1b" not in wide
        assert "╭" not in wide
