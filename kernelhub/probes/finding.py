"""The answer of a probe: yes or no, with a reason and a remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One fact about this machine.

    Attributes:
        subject: what was asked about, e.g. ``"triton"``.
        ok: whether the answer is good enough to go on.
        value: the fact itself (a version, a path), or None.
        code: stable identifier of a bad answer, ``"found"`` for a good one.
        reason: what was seen, as a sentence.
        remedy: what to do about it; empty when there is nothing to do.
    """

    subject: str
    ok: bool
    value: str | None
    code: str
    reason: str
    remedy: str = ""


def found(subject: str, value: str | None, reason: str) -> Finding:
    """A good answer."""
    return Finding(subject, True, value, "found", reason)


def lacking(subject: str, code: str, reason: str, remedy: str, value: str | None = None) -> Finding:
    """A bad answer."""
    return Finding(subject, False, value, code, reason, remedy)
