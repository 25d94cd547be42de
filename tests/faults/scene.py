"""What cases share: a kernel of an imaginary library, and what became of it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import kernelhub
from kernelhub.dispatch.constraint import Constraint
from kernelhub.dispatch.select import Decision
from tests.dispatch.backends import qkv, record, register
from tests.faults.record import NOTHING, Fault
from tests.faults.records import FAULTS

KERNEL = "acme.k"


def acme(target: str, *constraints: Constraint, **more: Any) -> None:
    """A plugin's kernel of `attention`, which would be chosen before all of ours."""
    register("acme", record(KERNEL, target, *constraints, **more))


def decision(**features: Any) -> Decision:
    """What was decided about it."""
    selection = kernelhub.explain(kernelhub.attention, *qkv(), **features)
    return next(item for item in selection.decisions if item.kernel == KERNEL)


def check(key: str) -> None:
    """A call answers rightly, and what was decided has the code of the fault, with a reason and a remedy."""
    q, k, v = qkv()
    torch.testing.assert_close(kernelhub.attention(q, k, v), kernelhub.attention.reference(q, k, v), rtol=0, atol=1e-4)
    code_is(FAULTS[key], decision())


def code_is(fault: Fault, found: Any) -> None:
    """A decision or finding is that of a fault."""
    assert found.code == fault.code, found
    assert found.reason
    assert found.remedy or fault.remedy.startswith("nothing"), found


def run(code: str, environment: Mapping[str, str], *before: str, timeout_s: float = 60.0) -> str:
    """What a process of its own printed. It ends well, and says nothing on stderr.

    Args:
        code: Python.
        environment: of the process.
        before: words before the interpreter's, such as those that take the network away.
        timeout_s: a process that takes longer hangs.
    """
    import sys

    command = [*before, sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(environment), timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def script(path: Path, text: str) -> Path:
    """A program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


__all__ = ["NOTHING", "acme", "check", "code_is", "decision", "run", "script"]
