"""Running another program, with an end: no wrapper, compiler or licence server that hangs is waited for longer."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence


def run(
    command: Sequence[str | os.PathLike[str]], timeout_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with no input, and give what it said.

    It runs in a session of its own, so that what it started ends with it: a compiler's driver that is killed alone
    leaves its passes behind, and they hold the pipes open that its answer is read from.

    Raises:
        subprocess.TimeoutExpired: it did not end within `timeout_s`, or what it started did not.
        OSError: it cannot be run.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:  # Ctrl-C too: nobody is left who would end it
            end_group(process.pid)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def end_group(leader: int) -> None:
    """End a process that leads a session, and all that it started there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
