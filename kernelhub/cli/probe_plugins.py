"""A trial import of each plugin in its own process, which the plugin may end or block."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

from kernelhub.cli.fact import NOTE, OK, Fact
from kernelhub.probes.distributions import EntryPoint, entry_points

_GROUP = "kernelhub.backends"
_TIMEOUT_S = 60.0
_LIVES = "the process lives"
_CHILD = f"""
import importlib, os, sys
out = os.dup(1)
os.dup2(2, 1)
try:
    importlib.import_module(sys.argv[1])
except BaseException:
    pass
os.write(out, {_LIVES.encode()!r})
"""


def probed() -> Iterator[Fact]:
    """The result of each plugin's import; this process does not load those that end a process or hang."""
    entries, _ = entry_points(_GROUP)
    harmless = []
    for entry in entries:
        ended = _ends(entry)
        what = f"plugin {entry.name} ({entry.distribution.name} {entry.distribution.version or ''}, {entry.module})"
        if not ended:
            harmless.append(entry.name)
            yield Fact(OK, what, "its import does not end the process")
        else:
            remedy = "uninstall it, or name the others in KERNELHUB_PLUGINS"
            yield Fact(NOTE, what, f"importing it {ended}; so would the first call of kernelhub in any process", remedy)
    if len(harmless) < len(entries):
        os.environ["KERNELHUB_PLUGINS"] = ",".join(harmless) or "none"


def _ends(entry: EntryPoint) -> str:
    """How the import ended a process, as a phrase; empty if it did not, or only raised an error."""
    command = [sys.executable, "-c", _CHILD, entry.module]
    try:
        done = subprocess.run(command, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL, capture_output=True)
    except subprocess.TimeoutExpired:
        return f"did not return within {_TIMEOUT_S:g} s"
    if done.stdout == _LIVES.encode():
        return ""
    if done.returncode < 0:
        return f"ended it by {signal.Signals(-done.returncode).name}"
    return f"ended it with exit code {done.returncode}"
