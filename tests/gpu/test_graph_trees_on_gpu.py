"""Calls that torch traces or captures, and threads that have not used CUDA: the parts of `graph_trees`."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", [None, "triton"])
@pytest.mark.parametrize("part", ["trees", "traced", "threads"])
def test_a_part(part: str, backend: str | None) -> None:
    """Each in a process of its own: only there are its temporaries the first of their stream."""
    command = [sys.executable, "-m", "tests.gpu.graph_trees", part]
    command += [] if backend is None else ["--backend", backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
