"""What a process that reconfigures for a year keeps, measured in a process that no other test has used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MEASURED = Path(__file__).with_name("growth.py")


def test_reconfiguring_grows_nothing() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(MEASURED)]
    answer = subprocess.run(command, cwd=MEASURED.parents[2], capture_output=True, text=True, timeout=500)
    assert answer.returncode == 0, answer.stdout[-4000:]
