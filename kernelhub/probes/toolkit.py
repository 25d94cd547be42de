"""Which compilers and driver are here. Read for `doctor`; the only probe that may start a process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from kernelhub.probes.finding import Finding, found, lacking

_PROCESS_TIMEOUT_S = 10.0


def driver() -> Finding:
    """Version of the NVIDIA kernel driver, read from /proc; CUDA is not initialised."""
    path = Path("/proc/driver/nvidia/version")
    try:
        text = path.read_text()
    except OSError:
        return lacking(
            "NVIDIA driver",
            "driver_missing",
            "no NVIDIA driver is loaded",
            "if this machine has an NVIDIA GPU, install its driver",
        )
    version = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", text)
    return found(
        "NVIDIA driver",
        version[1] if version else None,
        f"NVIDIA driver {version[1] if version else '(version unreadable)'}",
    )


def nvcc() -> Finding:
    """The CUDA compiler: CUDA_HOME or CUDA_PATH first, then PATH, as torch looks for it."""
    remedy = "set CUDA_HOME to a CUDA toolkit; only backends that compile CUDA sources need it"
    root = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    executable = str(Path(root) / "bin" / "nvcc") if root else shutil.which("nvcc")
    if executable is None or not os.path.exists(executable):
        where = f"no nvcc in {root}/bin" if root else "no nvcc on PATH"
        return lacking("nvcc", "toolkit_missing", where, remedy)
    try:
        answer = subprocess.run([executable, "--version"], capture_output=True, text=True, timeout=_PROCESS_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return lacking("nvcc", "toolkit_broken", f"{executable} does not answer: {error}", remedy)
    version = re.search(r"release (\d+\.\d+)", answer.stdout)
    if answer.returncode != 0 or version is None:
        return lacking(
            "nvcc",
            "toolkit_broken",
            f"{executable} --version gives no version (exit {answer.returncode})",
            remedy,
        )
    return found("nvcc", version[1], f"nvcc {version[1]} at {executable}")
