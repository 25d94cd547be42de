"""A call that waits for a compiler reports it once: on a terminal as progress, elsewhere as one log record."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from kernelhub.backends.cpp import build
from kernelhub.probes import toolchain
from kernelhub.runtime.progress import Heart

SENTENCE = "small.cpp, once for this CPU"


class Terminal(io.StringIO):
    """A stream in memory that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def source(tmp_path):
    if toolchain.cxx_compiler().value is None:
        pytest.skip("no C++ compiler: 4 cases")
    path = tmp_path / "small.cpp"
    path.write_text('extern "C" int one() { return 1; }\n')
    return path


@pytest.fixture
def records(caplog):
    caplog.set_level(logging.INFO, logger="kernelhub.compile")
    return caplog


def test_without_a_terminal_it_is_one_log_record(source, records, capfd) -> None:
    build.built(source, source.parent / "cache")
    build.built(source, source.parent / "cache")
    assert [record.getMessage() for record in records.records] == [f"compiling {SENTENCE}"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("rich", [True, False], ids=["rich", "no rich"])
def test_on_a_terminal_it_is_shown(source, rich, monkeypatch) -> None:
    if rich:
        pytest.importorskip("rich", reason="rich is not installed: 1 case")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(sys, "stderr", stderr := Terminal())
    monkeypatch.setenv("COLUMNS", "200")
    build.built(source, source.parent / "cache")
    shown = stderr.getvalue()
    assert "compiling" in shown
    assert SENTENCE in shown
    if not rich:
        assert shown.count("\n") == 1


def test_a_display_that_shows_it_already_is_enough(source, records, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr := Terminal())
    with Heart(lambda beat: None, None):
        build.built(source, source.parent / "cache")
    assert (stderr.getvalue(), records.records) == ("", [])
