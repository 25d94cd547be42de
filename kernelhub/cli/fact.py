"""A line of `doctor`: what was found, what it means, what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass

OK, NOTE, PROBLEM = "ok", "note", "problem"


@dataclass(frozen=True)
class Fact:
    """One finding about this machine.

    Attributes:
        status: ``"ok"``; ``"note"``, calls run but something could be faster or is missing; ``"problem"``,
            calls fail until it is mended.
        what: what was found.
        meaning: what that means for kernelhub.
        remedy: what to do; empty when there is nothing to do.
    """

    status: str
    what: str
    meaning: str
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        """Plain values for JSON."""
        return asdict(self)
