"""Who a rank is, and whether its process still lives: told from outside where both are on one machine."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """One process.

    Attributes:
        host: its name, for people.
        namespace: equal for two processes that can see each other by number; empty if that cannot be told.
        pid: its number there.
        started: when it started, in the kernel's ticks, so that a number that was given again is told; 0 if unknown.
    """

    host: str
    namespace: str
    pid: int
    started: int

    def __str__(self) -> str:
        return f"{self.host}, process {self.pid}"

    def gone(self) -> str:
        """Why the process runs no more, as a phrase; empty if it runs, or if that cannot be seen from here."""
        if not self.namespace or self.namespace != _namespace():
            return ""
        state, started = _state_of(self.pid)
        if not state or (self.started and started != self.started):
            return "has ended"
        return "was killed or has ended" if state in "ZX" else ""

    def stopped(self) -> bool:
        """Whether the process is stopped by a signal or a debugger."""
        return self.namespace == _namespace() and bool(self.namespace) and _state_of(self.pid)[0] in ("T", "t")


def this_process() -> Process:
    """The process that asks."""
    return Process(socket.gethostname(), _namespace(), os.getpid(), _state_of(os.getpid())[1])


def _namespace() -> str:
    """Boot and PID namespace: two containers of one machine do not see each other's processes."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def _state_of(pid: int) -> tuple[str, int]:
    """State letter and start time of a process; empty and 0 if there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    return "", 0
