"""A short run of the fuzzer with a fixed seed, for each op: no wrong number, no foreign byte, no raw error.

`make fuzz` runs it long, scripts/verify_on_gpu.sh on a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelhub.dispatch.hub import HUB
from tests.fuzz.case import CaseId, Found, judged
from tests.fuzz.kernels import kernels_here, ops
from tests.fuzz.kinds import NAMES
from tests.fuzz.open import is_open
from tests.fuzz.outcome import PASSED, REFUSED, SKIPPED, Outcome
from tests.fuzz.run import Result, _followed

ROUNDS = 1  # through all kinds; kernels take turns


def cases_of(op: str) -> list[CaseId]:
    kernels = kernels_here(op, "cpu")
    numbers = range(ROUNDS * len(NAMES))
    cases = [CaseId(op, kernels[number % len(kernels)], NAMES[number % len(NAMES)], number, 0) for number in numbers]
    return [case for case in cases if not is_open(op, case.kernel, case.kind)]


@pytest.mark.parametrize("op", ops())
def test_varied_calls_are_right_or_refused_by_name(op: str) -> None:
    wrong = neither_right_nor_refused(cases_of(op))
    HUB.restore()
    assert not wrong, "\n".join(wrong)


def neither_right_nor_refused(cases: list[CaseId]) -> list[str]:
    """What is wrong with each case that is, or why it cannot be judged, with its command."""
    outcomes = [(case, judged(case, torch.device("cpu")).outcome) for case in cases]
    right = (PASSED, REFUSED, SKIPPED)
    return [f"{outcome.text}\n    {case.command}" for case, outcome in outcomes if outcome.kind not in right]


@pytest.mark.parametrize("kind", ["failed", "broken", "passed", "refused", "skipped"])
def test_what_is_neither_right_nor_refused_is_listed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(case: CaseId, device: torch.device) -> Found:
        if kind == "broken":
            raise TypeError("of the reference")
        return Found(Outcome(kind, "what became of it"), "", 0.0)

    monkeypatch.setattr("tests.fuzz.case.run_case", found)
    one, other = (CaseId("attention", "default", "base", number, 0) for number in range(2))
    wrong = neither_right_nor_refused([one, other])
    if kind in ("passed", "refused", "skipped"):
        assert wrong == []
        return
    text = "could not judge it: TypeError: of the reference" if kind == "broken" else "what became of it"
    assert [text in said for said in wrong] == [True, True]
    assert [case.command in said for case, said in zip((one, other), wrong, strict=True)] == [True, True]


class Writing:
    """A child that writes an entry of its journal in two pieces, and ends."""

    def __init__(self, journal: Path) -> None:
        self.journal = journal
        entry = json.dumps({"kind": "passed", "text": "", "note": "as drawn", "seconds": 0.1})
        self.pieces = [entry[:9], entry[9:] + "\n", entry[:5]]

    def poll(self) -> int | None:
        if not self.pieces:
            return 0
        with self.journal.open("a", encoding="utf-8") as file:
            file.write(self.pieces.pop(0))
        return None


def test_an_entry_is_read_once_it_is_whole(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    journal.touch()
    case, results, told = CaseId("all_reduce", "default", "base", 0, 0), list[Result](), list[Any]()
    assert _followed(Writing(journal), journal, [case, case], "cpu", None, results, told.append) == 1
    assert [(result.kind, result.note) for result in results] == [("passed", "as drawn")]
    assert told == results
