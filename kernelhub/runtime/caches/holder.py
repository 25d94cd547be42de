"""Who holds a lock, and whether it is still there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernelhub.probes import document
from kernelhub.probes.document import DocumentError

TOKEN = re.compile(r"[0-9a-f]{32}")  # it becomes part of a path
_MOST_BYTES = 1 << 16
_MOST_PID = 1 << 31
_WORDS = 255


@dataclass(frozen=True)
class Holder:
    """A process that holds a lock.

    Attributes:
        host: name of its machine.
        boot: identity of that machine's boot, empty where there is none.
        container: namespace of process ids; the same number is another process in another one.
        pid: process id there.
        started: when the process started, in clock ticks since the boot; empty where that cannot be told.
        token: unlike that of any other hold.
        command: how the process was started, for people.
    """

    host: str
    boot: str
    container: str
    pid: int
    started: str
    token: str
    command: str

    @classmethod
    def read(cls, path: Path) -> Holder | None:
        """Who a lock file names; None if it names nobody that a process of ours could be, or is gone."""
        try:
            told = document.read(path, _FIELDS, _MOST_BYTES)
        except (OSError, DocumentError):
            return None
        if not TOKEN.fullmatch(told["token"]) or not 0 < told["pid"] < _MOST_PID:
            return None
        return cls(**{name: _printed(told[name]) for name in _FIELDS})

    def to_text(self) -> str:
        """The contents of its lock file."""
        return json.dumps(asdict(self))

    def is_here(self) -> bool:
        """Whether its process id means something to this process."""
        return (self.host, self.boot, self.container) == _here()

    def ended(self) -> str | None:
        """Of a holder that `is_here`: the code of why it is gone, None if it runs."""
        if not _runs(self.pid):
            return "lock_dead_holder"
        started = started_at(self.pid)
        return "lock_reused_pid" if started and started != self.started else None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} ({self.command})"


_FIELDS = {"host": str, "boot": str, "container": str, "pid": int, "started": str, "token": str, "command": str}


def myself(token: str) -> Holder:
    """This process."""
    command = shlex.join([os.path.basename(sys.executable or "python"), *sys.argv])[:120]
    return Holder(*_here(), os.getpid(), started_at(os.getpid()), token, command)


def started_at(pid: int) -> str:
    """When a process started, in clock ticks since the boot; empty where that cannot be told."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    return text.rpartition(b")")[2].split()[19].decode()  # after the command, which may hold anything


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    return True


def _printed(value: Any) -> Any:
    """Words that a log line can bear: nothing that ends the line, or turns to the terminal."""
    if not isinstance(value, str):
        return value
    return "".join(letter if letter.isprintable() else "?" for letter in value[:_WORDS])


def _here() -> tuple[str, str, str]:
    boot = container = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        container = os.readlink("/proc/self/ns/pid")
    return socket.gethostname(), boot, container
