"""Wrong options of the benchmarks end before anything is measured, with what would be right."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    loaded = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - loaded:
        if (FOLDER / f"{name}.py").exists():
            del sys.modules[name]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """What a benchmark says of wrong options."""

    def message(main: Any, *options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["benchmark", *options])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        return capsys.readouterr().err

    return message


class TestKernelsAgainstTheRoof:
    def test_a_label_that_no_case_has_is_answered_with_the_labels(self, benchmarks, refused, monkeypatch) -> None:
        roofline = benchmarks("roofline")
        monkeypatch.setattr(roofline, "roofs", lambda device, budget_s: {})
        made = [SimpleNamespace(label="decode, 8 rows"), SimpleNamespace(label="prefill")]
        said = refused(
            lambda: roofline.main("", lambda device, quick: [lambda one=one: one for one in made]), "--only", "dcode"
        )
        assert "--only: no case matches 'dcode'; the cases are decode, 8 rows; prefill" in said

    @pytest.mark.parametrize("option", ["--out", "--plot"])
    @pytest.mark.parametrize("place", ["absent/result", "."])
    def test_a_file_that_cannot_be_written_is_named_first(
        self, benchmarks, refused, tmp_path, option, place, monkeypatch
    ) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace())  # matplotlib is there
        said = refused(lambda: benchmarks("roofline").main("", _never), option, str(tmp_path / place))
        assert f"{option}: {str(tmp_path / place)!r} cannot be written: name a file in a folder that exists" in said

    def test_a_picture_needs_matplotlib(self, benchmarks, refused, tmp_path, monkeypatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        said = refused(lambda: benchmarks("roofline").main("", _never), "--plot", str(tmp_path / "x.svg"))
        assert "pip install matplotlib" in said

    @pytest.mark.parametrize(
        ("text", "part"), [(None, "No such file"), ("root:x:0", "is no JSON of such a run"), ("[]", "no JSON of such")]
    )
    def test_an_earlier_run_that_is_none_is_named(self, benchmarks, refused, tmp_path, text, part) -> None:
        path = tmp_path / "earlier.json"
        if text is not None:
            path.write_text(text)
        assert part in refused(lambda: benchmarks("roofline").main("", _never), "--show", str(path))

    def test_an_earlier_run_is_shown(self, benchmarks, tmp_path, monkeypatch, capsys) -> None:
        path = tmp_path / "earlier.json"
        result = {"device": "CPU", "roofs": {"bytes_per_s": 1e9, "operations_per_s": 1e9}, "rows": []}
        path.write_text(json.dumps(result))
        monkeypatch.setattr(sys, "argv", ["benchmark", "--json", "--show", str(path)])
        assert benchmarks("roofline").main("", _never) == 0
        assert json.loads(capsys.readouterr().out) == result


def test_a_misspelt_op_of_calls_is_named(benchmarks, refused) -> None:
    assert "'atention' is not an op (did you mean attention?)" in refused(benchmarks("calls").main, "atention")


def test_threads_are_one_or_more(benchmarks, refused) -> None:
    assert "--threads 0: give numbers of threads" in refused(benchmarks("threads").main, "--threads", "2", "0")


def _never(device: Any, quick: bool) -> Any:
    raise AssertionError("something would be measured")
