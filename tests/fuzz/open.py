"""Known defects that are not fixed yet, none now: the gate's run omits their cases."""

from __future__ import annotations

from fnmatch import fnmatch

# Globs of op, kernel and kind, and the issue that says what is wrong.
OPEN: tuple[tuple[str, str, str, str], ...] = ()


def is_open(op: str, kernel: str, kind: str) -> bool:
    """Whether a defect of these cases is known."""
    return any(fnmatch(op, a) and fnmatch(kernel, b) and fnmatch(kind, c) for a, b, c, _ in OPEN)
