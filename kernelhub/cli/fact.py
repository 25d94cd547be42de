"""A line of `doctor`: what was found, what it means, what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass

OK, NOTE, PROBLEM, ABSENT = "ok", "note", "problem", "absent"

# Parts of the machine, in the order in which `doctor` shows them.
MACHINE, TOOLCHAIN, CACHES, SETTINGS, LIBRARIES, EVIDENCE, KERNELS = PARTS = (
    "machine",
    "toolchain",
    "caches",
    "settings",
    "libraries",
    "evidence",
    "kernels",
)


@dataclass(frozen=True)
class Fact:
    """One finding about this machine.

    Attributes:
        status: ``"ok"``; ``"note"``, calls run but something could be faster or is missing; ``"problem"``,
            calls fail until it is fixed; ``"absent"``, an optional library that is not installed.
        what: what was found.
        meaning: what that means for kernelhub.
        remedy: what to do; empty if nothing is needed.
        part: the part of the machine that it is about, one of `PARTS`.
    """

    status: str
    what: str
    meaning: str
    remedy: str = ""
    part: str = ""

    def to_dict(self) -> dict[str, str]:
        """Plain values for JSON."""
        return asdict(self)
