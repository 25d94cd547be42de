"""What a kernel takes is found out once for all workers, and all of them have the tests in one order."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import accepted


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(accepted._FOLDER, str(tmp_path))
    return tmp_path


def test_an_answer_is_found_out_once(folder: Path) -> None:
    asked: list[str] = []
    for _ in range(2):
        assert accepted.once("calls of a", lambda: asked.append("a") or ("x", 1)) == ("x", 1)
    assert accepted.once("calls of b", lambda: asked.append("b") or "y") == "y"
    assert asked == ["a", "b"]
    assert not list(folder.glob("*.part"))


def test_an_answer_that_may_not_be_kept_is_found_out_anew() -> None:
    asked: list[str] = []
    for _ in range(2):
        assert accepted.once("a", lambda: asked.append("a") or 3, lambda answer: answer != 3) == 3
    assert asked == ["a", "a"]


def test_what_fails_is_tried_again() -> None:
    def fails() -> None:
        raise ValueError("a")

    for _ in range(2):
        with pytest.raises(ValueError, match="a"):
            accepted.once("a", fails)
    assert accepted.once("a", lambda: 3) == 3


def _find_out_slowly(begun: Any) -> None:
    def slowly() -> str:
        begun.set()
        time.sleep(0.2)
        return "of the other process"

    accepted.once("a", slowly)


def test_a_process_waits_for_another_that_is_at_it() -> None:
    processes = multiprocessing.get_context("fork")
    begun = processes.Event()
    other = processes.Process(target=_find_out_slowly, args=(begun,))
    other.start()
    assert begun.wait(60)
    assert accepted.once("a", lambda: "of this process") == "of the other process"
    other.join(60)


@pytest.mark.parametrize("change", ["another size", "another time", "another file"])
def test_answers_of_other_sources_are_not_found(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for top in ("kernelhub", "tests"):
        (tmp_path / "root" / top).mkdir(parents=True)
    source = tmp_path / "root" / "kernelhub" / "a.py"
    source.write_text("1")
    monkeypatch.setattr(accepted, "_ROOT", tmp_path / "root")
    places = []
    for changed in (False, False, True):
        if changed and change == "another time":
            os.utime(source, (1, 1))
        elif changed:
            (source if change == "another size" else source.with_name("b.py")).write_text("12")
        accepted.keep_in(tmp_path / "memory")
        places.append(os.environ[accepted._FOLDER])
    assert places[0] == places[1] != places[2]


def _tests_of(worker: str | None, *named: str) -> list[str]:
    """As a worker has them in the end, of two folders that it goes through from its end."""
    config: Any = SimpleNamespace(args=named or ("tests",), invocation_params=SimpleNamespace(dir=Path("/root")))
    if worker is not None:
        config.workerinput = {"workerid": worker}

    def reported(name: str, children: list[Any], base: type) -> Any:
        collector = base.__new__(base)
        collector.name, collector.config = name, config
        hook = accepted.pytest_make_collect_report(collector)
        next(hook)
        with pytest.raises(StopIteration) as end:
            hook.send(SimpleNamespace(result=children))
        return end.value.value.result

    def node(name: str) -> Any:
        return SimpleNamespace(name=name, stash=pytest.Stash(), children=[])

    folders = [node("ops"), node("runtime")]
    for place, above in enumerate(folders):
        files = reported(above.name, [node(f"{place}{letter}") for letter in "ab"], pytest.Dir)
        for file in files:
            tests = [node(f"{file.name}{number}") for number in (2, 1)]
            above.children += [(file, test) for test in reported(file.name, tests, pytest.Module)]
    items = [
        SimpleNamespace(
            name=test.name,
            path=Path("/root/tests", above.name, file.name),
            listchain=lambda chain=(above, file, test): list(chain),
        )
        for above in reported("tests", folders, pytest.Dir)
        for file, test in above.children
    ]
    collected: list[Any] = list(items)
    accepted.pytest_collection_modifyitems(config, collected)
    if worker == "gw1":
        assert items[0].name == "1b2"  # it began at the end
    return [item.name for item in collected]


def test_all_workers_have_the_tests_in_one_order() -> None:
    want = ["0a2", "0a1", "0b2", "0b1", "1a2", "1a1", "1b2", "1b1"]
    assert [_tests_of(worker) for worker in (None, "gw0", "gw1", "gw2")] == [want] * 4


@pytest.mark.parametrize(
    "named",
    [("tests/runtime", "tests/ops"), ("tests/runtime/1a", "tests/runtime", "tests")],
    ids=["folders", "a file and its folders"],
)
def test_what_is_named_first_runs_first(named: tuple[str, ...]) -> None:
    want = ["1a2", "1a1", "1b2", "1b1", "0a2", "0a1", "0b2", "0b1"]
    assert [_tests_of(worker, *named) for worker in ("gw0", "gw1")] == [want] * 2
