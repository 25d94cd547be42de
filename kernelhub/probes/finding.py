"""The result of a probe: positive or negative, with a reason and a remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Rejection(NamedTuple):
    """Why a kernel cannot run a problem.

    Attributes:
        code: stable identifier, e.g. ``"capability"``; part of the public interface.
        reason: one sentence with the value that is wrong.
        remedy: what the user can do; empty when nothing can be done on this machine.
    """

    code: str
    reason: str
    remedy: str = ""


@dataclass(frozen=True)
class Finding:
    """One fact about this machine.

    Attributes:
        subject: what the probe examined, e.g. ``"triton"``.
        ok: whether the requirement is met.
        value: the fact itself (a version, a path), or None.
        code: stable identifier of a negative finding; ``"found"`` for a positive one.
        reason: what was found, as a sentence.
        remedy: what to do about it; empty if nothing is needed.
    """

    subject: str
    ok: bool
    value: str | None
    code: str
    reason: str
    remedy: str = ""

    @property
    def rejection(self) -> Rejection | None:
        """The rejection of a kernel that a negative finding gives; None for a positive finding."""
        return None if self.ok else Rejection(self.code, self.reason, self.remedy)


def found(subject: str, value: str | None, reason: str) -> Finding:
    """A positive finding."""
    return Finding(subject, True, value, "found", reason)


def lacking(subject: str, code: str, reason: str, remedy: str, value: str | None = None) -> Finding:
    """A negative finding."""
    return Finding(subject, False, value, code, reason, remedy)
