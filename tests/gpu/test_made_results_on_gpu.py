"""Results that eager calls make for themselves: on streams, in graphs and in pools of memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu


def test_results_share_no_memory_and_are_where_they_are_wanted() -> None:
    """The checks of `made_results`, in a process that has made no pool of memory."""
    command = [sys.executable, "-m", "tests.gpu.made_results"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
