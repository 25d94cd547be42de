"""Whether processes of this machine can pass each other handles of GPU memory, proved by passing file descriptors.

torch exchanges the handles of symmetric memory as descriptors, through Unix sockets in the temporary folder that are
named by processes. It waits for them without limit, so where a container or a file system does not allow it, ranks
hang. A child process (`handle_child.py`) does the same without a GPU, and is ended after a time-out.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from kernelhub.probes.finding import Finding, found, lacking
from kernelhub.probes.toolchain import run

HANDLES_TIMEOUT_S = 20.0
_CHILD = str(Path(__file__).with_name("handle_child.py"))
_REMEDY = "set TMPDIR to a short path on a local file system, the same for all ranks"
_REFUSED = "ptrace_refused"
_NAMES = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")  # in torch's order


class Handles(NamedTuple):
    """What this process and others can do.

    Attributes:
        folder: where torch makes its sockets.
        sending: whether a descriptor can be sent through a socket there: symmetric memory needs it.
        taking: whether a process can take a descriptor of another (pidfd_getfd): torch needs it to share expandable
            segments between processes, kernels over peer memory do not.
    """

    folder: str
    sending: Finding
    taking: Finding


def handle_folder() -> str:
    """Where torch makes the sockets through which it passes handles."""
    return next((os.environ[name] for name in _NAMES if name in os.environ), "/tmp")


def probe_handles(timeout_s: float = HANDLES_TIMEOUT_S) -> Handles:
    """What this process and others can do, with the temporary folder as it is now."""
    return _probed(handle_folder(), timeout_s)


@functools.cache
def _probed(folder: str, timeout_s: float) -> Handles:
    subject = "passing handles of memory between processes"
    try:
        done = run([sys.executable, "-I", _CHILD, folder], timeout_s)
        answer = json.loads(done.stdout)
        code, why, taking = answer["code"], answer["why"], answer["taking"]
    except subprocess.TimeoutExpired:
        code, why, taking = "probe_timeout", f"the probe in {folder} did not end within {timeout_s:g} s", "not probed"
    except (OSError, ValueError, TypeError, KeyError) as error:
        code, why, taking = "probe_failed", f"the probe cannot be run: {error}", "not probed"
    sending = lacking(subject, code, why, _REMEDY) if code else found(subject, folder, f"sent through {folder}")
    return Handles(folder, sending, _of_taking(taking))


def _of_taking(why: str) -> Finding:
    subject = "taking descriptors of other processes"
    if not why:
        return found(subject, None, "allowed")
    remedy = "start the container with --cap-add SYS_PTRACE, or set kernel.yama.ptrace_scope to 0"
    return lacking(subject, _REFUSED, f"pidfd_getfd: {why}", remedy)
