"""How many attacks tests made and what became of them, in one line for each kind at the end of a run."""

from __future__ import annotations

from collections import Counter

import pytest

PREFIX = "attacks: "
_counted: dict[str, Counter[str]] = {}


class Attacks(Counter[str]):
    """What became of the attacks of one test."""

    def note(self, item: pytest.Item, kind: str) -> None:
        """Have them in the line of their kind."""
        item.user_properties += [(f"{PREFIX}{kind}", f"{number} {what}") for what, number in self.items()]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Gather, also from the processes of a parallel run."""
    if report.when != "teardown":
        return
    for name, told in report.user_properties:
        if name.startswith(PREFIX):
            number, what = str(told).split(" ", 1)
            _counted.setdefault(name.removeprefix(PREFIX), Counter())[what] += int(number)


def pytest_terminal_summary(terminalreporter) -> None:
    """Print."""
    for kind, counted in sorted(_counted.items()):
        told = ", ".join(f"{number} {what}" for what, number in sorted(counted.items()))
        terminalreporter.write_line(f"{kind}: {sum(counted.values())} attacks: {told}")
