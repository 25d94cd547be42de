"""Which CUDA compiler and driver are here. Read for `doctor`."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from kernelhub.probes import toolchain
from kernelhub.probes.finding import Finding, found, lacking


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
    return nvcc_at(Path(executable))


def nvcc_at(executable: Path) -> Finding:
    """A CUDA compiler that is there: whether it answers, has its headers, and makes what the driver loads."""
    answer = toolchain.answering(executable)
    if answer.value is None or not answer.ok:
        return answer
    major, minor = answer.value.split(".")
    fitting = toolchain.of_files(executable, (int(major), int(minor)), driver().value)
    return answer if fitting.ok else fitting
