"""Our CUDA kernels, thread by thread on a CPU, read and write within their operands: AddressSanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.emulated import COMPILER

RUNTIMES = ("libasan.so", "libubsan.so")


def _runtimes() -> list[str]:
    """Those of the compiler, which must be loaded before Python."""
    found = [
        subprocess.run([str(COMPILER.value), f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in (RUNTIMES if COMPILER.ok else ())
    ]
    return [path for path in found if Path(path).is_absolute()]


@pytest.mark.ahead
def test_every_kernel_stays_within_memory() -> None:
    """The tests of test_emulated.py, in a process of their own."""
    runtimes = _runtimes()
    if len(runtimes) < len(RUNTIMES):
        pytest.skip(f"no AddressSanitizer beside {COMPILER.value}: every test of test_emulated.py")
    asked = {"CUDA_EMULATION_ASAN": "1", "ASAN_OPTIONS": "detect_leaks=0", "LD_PRELOAD": " ".join(runtimes)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-m",
        "",
        str(Path(__file__).with_name("test_emulated.py")),
    ]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=580, env=os.environ | asked)
    assert answer.returncode == 0, (answer.stdout + answer.stderr)[-3000:]
