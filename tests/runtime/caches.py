"""Places, children and mounts for the tests of the caches. Faults are real: other processes, users and file systems."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STRANGER = 12345  # a user id without an account

# Everything that a child needs is imported before it may become somebody who cannot read the interpreter's files.
PRELUDE = """
import errno, json, os, shutil, sys, tempfile, time
from pathlib import Path
from kernelhub.runtime.caches import inventory, lock, manifest, notices, root, store, variables
from kernelhub.runtime.caches.fingerprint import fingerprint
from kernelhub.runtime.caches.store import Store
scratch = tempfile.mkdtemp()
warm = Store("warm", fingerprint("any"), folder=Path(scratch))
warm.get("x", lambda folder: (folder / "x").write_text("x"))
warm.update("y", lambda document: 1)
shutil.rmtree(scratch)
root.best()
notices.forget()
def answer(**told):
    said = [notice.code for notice in notices.cache_notices()]
    print(json.dumps({"said": said, **told}, default=str))
def write(text):
    return lambda folder: (folder / "made").write_text(text)
"""


def clean(**more: str | None) -> dict[str, str]:
    """This process's environment without what names a cache, and with what is given; None takes a variable away."""
    gone = ("KERNELHUB_CACHE_DIR", "XDG_CACHE_HOME", "TMPDIR", "TEMP", "TMP")
    environment = {name: value for name, value in os.environ.items() if name not in gone}
    environment["PYTHONPATH"] = str(ROOT)
    for name, value in more.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


def child(
    code: str, environment: Mapping[str, str], *, user: int | None = None, mounts: tuple[str, ...] = ()
) -> dict[str, Any]:
    """What a process of its own answered.

    Args:
        code: runs after `PRELUDE`, and calls ``answer(...)`` last.
        environment: of the process.
        user: whom it becomes after the prelude; None stays.
        mounts: shell commands run before it in a mount namespace of its own, which ends with it.
    """
    become = f"os.setgroups([]); os.setgid({user}); os.setuid({user})\n" if user is not None else ""
    command = [sys.executable, "-c", PRELUDE + become + code]
    if mounts:
        script = " && ".join([*mounts, 'exec "$0" "$@"'])
        command = [*str(mount_namespace()).split(), "sh", "-c", script, *command]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(environment), timeout=120, cwd="/")
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told | {"stderr": done.stderr}


@functools.cache
def mount_namespace() -> str | None:
    """A command after which file systems may be mounted without anybody else seeing them; None without leave."""
    for command in ("unshare --mount", "unshare --user --map-root-user --mount"):
        trial = [*command.split(), "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
        try:
            done = subprocess.run(trial, capture_output=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode == 0:
            return command
    return None
