"""All twelve kinds are there, every fault is injected by a test that names its code, and counting counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.faults.counting import Counts
from tests.faults.record import FIXTURES, NOTHING
from tests.faults.records import FAULTS

ROOT = Path(__file__).parents[2]


def pytest_of(*words: str, **environment: str) -> str:
    """What a run of pytest in a process of its own printed."""
    command = [sys.executable, "-m", "pytest", "-q", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def injecting_tests(listed: Path) -> list[dict[str, Any]]:
    """The tests that inject faults, as pytest collects them, with the keys of these."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.fault(" in path.read_text()]
    names = [str(path.relative_to(ROOT)) for path in files]
    pytest_of("-n0", "--collect-only", "-p", "tests.faults.listing", *names, FAULTS_LIST=str(listed))
    told: list[dict[str, Any]] = json.loads(listed.read_text())
    return told


def test_all_twelve_kinds_are_there() -> None:
    assert list(FIXTURES) == [f"FX{number}" for number in range(1, 13)]
    assert {fault.fixture for fault in FAULTS.values()} == set(FIXTURES)


def test_every_fault_is_injected_by_some_test_that_names_its_code(tmp_path) -> None:
    """So that no record says one thing while the test asserts another."""
    injecting = injecting_tests(tmp_path / "list.json")
    injected = {key for item in injecting for key in item["keys"]}
    assert set(FAULTS) - injected == set(), "faults that no test injects"
    assert injected <= set(FAULTS)
    texts = {item["file"]: Path(item["file"]).read_text() for item in injecting}
    for key, fault in FAULTS.items():
        asked = [texts[file] for file in {item["file"] for item in injecting if key in item["keys"]}]
        by_record = any("FAULTS[" in text or "check(" in text for text in asked)
        by_code = key == fault.code  # the mark is made of the very word that the test asserts
        by_name = any(fault.code in text for text in asked)
        assert by_record or by_code or by_name or fault.code == NOTHING, (key, fault.code)


def test_faults_that_want_something_else_of_the_user_have_another_code() -> None:
    remedies: dict[str, set[str]] = {}
    for fault in FAULTS.values():
        remedies.setdefault(fault.code, set()).add(fault.remedy)
    assert {code: wanted for code, wanted in remedies.items() if len(wanted) > 1} == {}


class TestCounting:
    @staticmethod
    def report(key: str, when: str, outcome: str, test: str = "a") -> Any:
        outcomes = {name: name == outcome for name in ("passed", "failed", "skipped")}
        return SimpleNamespace(user_properties=[("fault", key), ("ran", "x")], when=when, nodeid=test, **outcomes)

    def row(self, counts: Counts) -> tuple[int, ...]:
        row = next(row for row in counts.rows() if row["fixture"] == "FX12")
        return tuple(row[name] for name in ("injected", "survived", "lost", "cases"))

    def test_a_fault_survives_if_every_case_of_it_does(self) -> None:
        counts = Counts()
        for when in ("setup", "call", "teardown"):
            counts.note(self.report("zeros", when, "passed"))
        assert self.row(counts) == (1, 1, 0, 1)
        counts.note(self.report("zeros", "call", "failed", "b"))
        assert self.row(counts) == (1, 0, 1, 2)

    @pytest.mark.parametrize("when", ["setup", "call", "teardown"])
    def test_a_failure_in_any_phase_is_a_loss(self, when) -> None:
        counts = Counts()
        counts.note(self.report("nan", "call", "passed"))
        counts.note(self.report("nan", when, "failed"))
        assert self.row(counts) == (1, 0, 1, 1)

    def test_what_was_skipped_was_not_injected(self) -> None:
        counts = Counts()
        counts.note(self.report("nan", "setup", "skipped"))
        assert self.row(counts) == (0, 0, 0, 0)
        assert counts.to_dict()["faults"][-1]["state"] == "not in this run"

    def test_a_worker_that_went_away_is_reported(self) -> None:
        counts = Counts()
        counts.note(self.report("nan", "???", "failed", "tests/x.py::test_y"))
        assert counts.to_dict()["crashed"] == ["tests/x.py::test_y"]

    def test_those_of_several_workers_are_gathered_and_printed(self) -> None:
        printed = pytest_of("-n2", "tests/probes/test_signature.py")
        rows = {line.split()[0]: line.split()[-5:] for line in printed.splitlines() if line.startswith("FX")}
        faults = sum(fault.fixture == "FX1" for fault in FAULTS.values())
        assert rows["FX1"] == [str(faults), "2", "2", "0", "4"]
        assert set(rows) == {"FX1"}, "kinds of which nothing was injected are left out"
        (last,) = [line.split() for line in printed.splitlines() if line.split()[:1] == ["all"]]
        assert last[1:] == [str(len(FAULTS)), "2", "2", "0", "4"]
        kept = json.loads((ROOT / "build" / "faults.json").read_text())
        assert [row["fixture"] for row in kept["fixtures"]] == list(FIXTURES)
        assert {item["state"] for item in kept["faults"]} == {"survived", "not in this run"}

    def test_a_mark_that_names_no_fault_is_an_error(self) -> None:
        from tests.faults.counting import note_faults

        mark = pytest.mark.fault("no_such_fault").mark
        item: Any = SimpleNamespace(nodeid="a", user_properties=[], iter_markers=lambda name: [mark])
        with pytest.raises(pytest.UsageError, match="there is no fault 'no_such_fault'"):
            note_faults([item])
