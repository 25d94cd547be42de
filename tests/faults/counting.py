"""Counts faults over a run: what was injected, what survived, what was lost. Hooks, which `tests/conftest.py` takes.

A fault survives if every case of it passed, and an op that has nothing to do with it still answers afterwards. A case
that fails, hangs into its time-out, or takes its worker down is lost. Counts are gathered by whoever reports, which
with several workers is the process that started them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.faults.record import FIXTURES
from tests.faults.records import FAULTS

_COUNTS = pytest.StashKey["Counts"]()


@dataclass
class Counts:
    """What is known of the faults of a run.

    Attributes:
        passed: cases by fault, each by the id of its test.
        failed: the same of those that were lost.
        crashed: tests that took their process with them, whose faults nobody can tell.
    """

    passed: dict[str, set[str]] = field(default_factory=dict)
    failed: dict[str, set[str]] = field(default_factory=dict)
    crashed: set[str] = field(default_factory=set)

    def note(self, report: pytest.TestReport) -> None:
        """Take one report of a phase of a test into account."""
        if report.when not in ("setup", "call", "teardown"):
            self.crashed.add(report.nodeid)
            return
        for key in [value for name, value in report.user_properties if name == "fault"]:
            if report.failed:
                self.failed.setdefault(str(key), set()).add(report.nodeid)
            elif report.passed and report.when == "call":
                self.passed.setdefault(str(key), set()).add(report.nodeid)

    @property
    def injected(self) -> set[str]:
        return {*self.passed, *self.failed}

    @property
    def survived(self) -> set[str]:
        return set(self.passed) - set(self.failed)

    def rows(self) -> list[dict[str, Any]]:
        """One for each kind of fault: how many there are, were injected, survived and were lost, in how many cases."""
        rows = []
        for fixture, (title, _) in FIXTURES.items():
            keys = {key for key, fault in FAULTS.items() if fault.fixture == fixture}
            cases = sum(len(self._cases(key)) for key in keys)
            rows.append(
                {
                    "fixture": fixture,
                    "title": title,
                    "faults": len(keys),
                    "injected": len(keys & self.injected),
                    "survived": len(keys & self.survived),
                    "lost": len(keys & set(self.failed)),
                    "cases": cases,
                }
            )
        return rows

    def to_dict(self) -> dict[str, Any]:
        told = [
            {
                "key": key,
                "fixture": fault.fixture,
                "code": fault.code,
                "state": self._state(key),
                "cases": sorted(self._cases(key)),
            }
            for key, fault in FAULTS.items()
        ]
        return {"fixtures": self.rows(), "faults": told, "crashed": sorted(self.crashed)}

    def _cases(self, key: str) -> set[str]:
        return {*self.passed.get(key, ()), *self.failed.get(key, ())}

    def _state(self, key: str) -> str:
        return "lost" if key in self.failed else "survived" if key in self.passed else "not in this run"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_COUNTS] = Counts()
    config.pluginmanager.register(_Reports(config.stash[_COUNTS]), "faults of this run")


def note_faults(items: list[pytest.Item]) -> None:
    """Have reports of marked tests say of which faults they are; a mark that names none is an error."""
    for item in items:
        for mark in item.iter_markers("fault"):
            for key in mark.args:
                if key not in FAULTS:
                    raise pytest.UsageError(f"{item.nodeid}: there is no fault {key!r} in tests/faults/records.py")
                item.user_properties.append(("fault", key))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """After a fault, and after all that a test changed was undone, an op that has nothing to do with it answers."""
    yield
    if item.get_closest_marker("fault") is not None:
        _answers()


def _answers() -> None:
    import kernelhub

    ones = torch.ones(2, 2, 4)
    merged = kernelhub.merge_attention_states((ones, 3 * ones), (torch.zeros(2, 2), torch.zeros(2, 2)))
    assert torch.equal(merged, 2 * ones), "an op that has nothing to do with the fault gives wrong numbers"


class _Reports:
    """Takes what is reported, by this process or by its workers."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._counts.note(report)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """A table of the kinds that were injected, and all of it in build/faults.json."""
    counts = config.stash[_COUNTS]
    if not counts.injected:
        return
    rows = counts.rows()
    lines = [f"{'':44} {'faults':>8} {'injected':>8} {'survived':>8} {'lost':>8} {'cases':>8}"]
    for row in [*(row for row in rows if row["injected"]), _sum(rows)]:
        numbers = (row[name] for name in ("faults", "injected", "survived", "lost", "cases"))
        lines.append(f"{row['fixture']:5} {row['title']:38} " + " ".join(f"{number:8}" for number in numbers))
    terminalreporter.section("faults")
    for line in lines:
        terminalreporter.write_line(line)
    for key in sorted(counts.failed):
        terminalreporter.write_line(f"lost: {key}: {', '.join(sorted(counts.failed[key]))}")
    for test in sorted(counts.crashed):
        terminalreporter.write_line(f"lost: {test} took its process with it")
    path = config.rootpath / "build" / "faults.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(counts.to_dict(), indent=1) + "\n")


def _sum(rows: list[dict[str, Any]]) -> dict[str, Any]:
    total = {name: sum(row[name] for row in rows) for name in ("faults", "injected", "survived", "lost", "cases")}
    return {"fixture": "", "title": "all", **total}
