"""A contract in few cases that together show every feature, for kernels whose contracts a test calls itself."""

from __future__ import annotations

from typing import Any

from tests.shown import few, words


def check_few_cases(contract: type, kernel: str) -> None:
    """The kernel passes them on a CPU."""
    subject: Any = type("Subject", (contract,), {"kernel": kernel, "device": "cpu"})()
    cases = {case.label: case for case in subject.accepted_cases()}
    chosen = few({label: set(words(case)) for label, case in cases.items()})
    assert chosen
    for label in chosen:
        subject.test_case(cases[label])
