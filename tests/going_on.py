"""A run of tests that goes on where an earlier one ended, with something of every kernel first.

TESTS_PASSED=FILE notes in this file each test that passed or was skipped. The next run of the same sources with the
same versions and GPU leaves those out; for other sources the file is begun anew. FILE.all says how many tests there
are. Each run begins with one test of each class and then of each function, so that a run that is cut short has called
every kernel. Then come those that take long by `seconds.json`, and the rest in their usual order.

`python -m tests.going_on JUNIT ...` writes `seconds.json` from files of runs on a GPU.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

ROOT = Path(__file__).parents[1]
SECONDS = Path(__file__).with_name("seconds.json")
# Seconds of the first test of a class, which compiles its kernel, and of a function, where more is not known.
OF_A_KERNEL, OF_A_FORM = 2.0, 0.5
LONG = 1.0  # seconds of a test from which on `seconds.json` has its function
BEFORE = pytest.StashKey[Path]()  # a file of what had passed when the run began
_INHERITED = "TESTS_PASSED_BEFORE"  # by workers, those too that replace lost ones; processes of tests inherit nothing


def sources() -> str:
    """A hash of the sources, the versions and the kind of GPU that the tests depend on."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    state = hashlib.sha256(repr((sys.version, torch.__version__, gpu)).encode())
    for top in ("kernelhub", "csrc", "tests"):
        for path in sorted((ROOT / top).rglob("*")):
            if path.suffix in {".py", ".cu", ".cpp", ".h", ".json"} and path != SECONDS:
                state.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return state.hexdigest()


class Noted:
    """The file of tests that passed, to which each is added when it has ended."""

    def __init__(self, path: Path, state: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        if lines[:1] != [state]:
            lines = [state]
            path.write_text(f"{state}\n")
        self.before = lines[1:]
        self._failed: set[str] = set()
        self._file = path.open("a", buffering=1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of each part of a test. It passed if none failed."""
        if report.failed:
            self._failed.add(report.nodeid)
        if report.when == "teardown" and report.nodeid not in self._failed:
            self._file.write(f"{report.nodeid}\n")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        if before := os.environ.pop(_INHERITED, None):
            config.stash[BEFORE] = Path(before)
    elif path := os.environ.pop("TESTS_PASSED", None):
        noted = Noted(Path(path), sources())
        config.pluginmanager.register(noted)
        config.stash[BEFORE] = before = Path(f"{path}.before").absolute()
        before.write_text("\n".join(noted.before))
        if config.getoption("numprocesses", None):
            os.environ[_INHERITED] = str(before)


@pytest.hookimpl(trylast=True)  # marks have left out others by then
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    before = config.stash.get(BEFORE, None)
    if before is None:
        return
    if getattr(config, "workerinput", {"workerid": "gw0"})["workerid"] == "gw0":
        before.with_suffix(".all").write_text(f"{len(items)}\n")
    passed = frozenset(before.read_text().splitlines())
    if gone := [item for item in items if not passed.isdisjoint(_names(item))]:
        config.hook.pytest_deselected(items=gone)
    left = [item for item in items if passed.isdisjoint(_names(item))]
    items[:] = [left[at] for at in order([item.nodeid for item in left])]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run for which nothing is left has ended well."""
    before = session.config.stash.get(BEFORE, None)
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and before and before.read_text():
        session.exitstatus = pytest.ExitCode.OK


def _names(item: pytest.Item) -> Iterable[str]:
    """Its name alone, and that which pytest-xdist gives it with its group."""
    groups = [mark.args[0] if mark.args else mark.kwargs["name"] for mark in item.iter_markers("xdist_group")]
    return (item.nodeid, *(f"{item.nodeid}@{group}" for group in groups[:1]))


def order(names: Sequence[str]) -> list[int]:
    """Places of the tests as they are run."""
    turns = _turns(names)
    return sorted(
        range(len(names)), key=lambda at: (turns[at], -_octave(known_seconds().get(_function(names[at]), 0.0)))
    )


def expected_seconds(names: Sequence[str]) -> list[float]:
    """What each of the tests may take, 0 where it is short or nothing is known."""
    least = (OF_A_KERNEL, OF_A_FORM, 0.0)
    known = known_seconds()
    return [max(least[turn], known.get(_function(name), 0.0)) for turn, name in zip(_turns(names), names, strict=True)]


def _turns(names: Sequence[str]) -> list[int]:
    """0 for one test of each class, a case of its contract where it has any; 1 for one of each function; else 2."""
    of_class: defaultdict[str, list[int]] = defaultdict(list)
    of_function: dict[str, int] = {}
    for at, name in enumerate(names):
        function = _function(name)
        of_class[function.rpartition("::")[0] if function.count("::") > 1 else function].append(at)
        of_function.setdefault(function, at)
    turns = [2] * len(names)
    for at in of_function.values():
        turns[at] = 1
    for places in of_class.values():
        turns[next((at for at in places if _function(names[at]).endswith("::test_case")), places[0])] = 0
    return turns


def _function(name: str) -> str:
    return name.partition("[")[0]


def _octave(seconds: float) -> int:
    return 1 + int(math.log2(seconds)) if seconds >= LONG else 0


@functools.cache
def known_seconds() -> dict[str, float]:
    """Of a test of each function that takes long on a GPU."""
    return json.loads(SECONDS.read_text())


def seconds_of(files: Iterable[Path]) -> dict[str, float]:
    """Mean seconds of the tests of each function that took long, from JUnit files."""
    took: defaultdict[str, list[float]] = defaultdict(list)
    for path in files:
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            if case.get("name") and case.get("classname") and not any(child.tag == "skipped" for child in case):
                took[_name_of(case)].append(float(case.get("time", 0.0)))
    means = {name: sum(seconds) / len(seconds) for name, seconds in took.items()}
    return {name: round(mean, 1) for name, mean in sorted(means.items()) if mean >= LONG}


def _name_of(case: Any) -> str:
    words = case.get("classname").split(".")
    of_file = next(end for end, word in enumerate(words, 1) if word.startswith("test_"))
    return "::".join(["/".join(words[:of_file]) + ".py", *words[of_file:], _function(case.get("name"))])


if __name__ == "__main__":
    known = known_seconds() if SECONDS.exists() else {}
    SECONDS.write_text(json.dumps({**known, **seconds_of(map(Path, sys.argv[1:]))}, indent=1, sort_keys=True) + "\n")
