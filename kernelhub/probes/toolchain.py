"""Compilers and the NVIDIA driver of this machine, and a way to run programs with a timeout.

Triton needs a C compiler and Python's headers at its first launch on a GPU; kernels for CPUs need a C++ compiler. A
CUDA toolkit is usable if its compiler runs, its headers match it, and the driver loads its output. `of_files` reads
files only; `answering` runs ``nvcc --version``, which may hang or be killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from kernelhub.probes import distributions
from kernelhub.probes.finding import Finding, found, lacking


def run(
    command: Sequence[str | os.PathLike[str]], timeout_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, without input, and return its output.

    It runs in its own session, so that its child processes end with it. If only a compiler's driver is killed, its
    passes keep running and keep its output pipes open.

    Raises:
        subprocess.TimeoutExpired: it, or a process that it started, did not end within `timeout_s`.
        OSError: it cannot be run.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:  # Ctrl-C too: nothing else would end it
            end_group(process.pid)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def end_group(leader: int) -> None:
    """End a session leader and all processes of its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def c_compiler() -> Finding:
    """The C compiler that Triton uses: CC, else gcc, else clang. It is looked up, not run."""
    remedy = "install gcc or clang, or set CC; Triton compiles its launcher with it"
    named = os.environ.get("CC")
    candidates = [named] if named is not None else ["gcc", "clang"]
    path = next((path for name in candidates if (path := shutil.which(name))), None)
    if path is None:
        where = f"CC={named} is not a command" if named is not None else "neither gcc nor clang is on PATH"
        return lacking("C compiler", "compiler_missing", where, remedy)
    return found("C compiler", path, f"C compiler {path}")


def cxx_compiler() -> Finding:
    """The C++ compiler for CPU kernels: CXX, else g++, clang++ or c++. It is looked up, not run."""
    remedy = "install g++ or clang++, or set CXX; kernels for this CPU are compiled with it"
    named = os.environ.get("CXX")
    candidates = [named] if named else ["g++", "clang++", "c++"]
    path = next((path for name in candidates if (path := shutil.which(name))), None)
    if path is None:
        where = f"CXX={named} is not a command" if named else "neither g++ nor clang++ is on PATH"
        return lacking("C++ compiler", "compiler_missing", where, remedy)
    return found("C++ compiler", path, f"C++ compiler {path}")


def cpu_kernels() -> Finding:
    """The libraries of C++ kernels for CPUs that a wheel carries; a checkout has none, and compiles at first use."""
    library = Path(__file__).parents[1] / "csrc" / "cpu" / "libkernelhub_base.so"
    if not library.is_file():
        remedy = "install a wheel that was built for this platform, or let the first use compile them"
        return lacking("CPU kernels", "not_prebuilt", f"there is no {library}", remedy)
    return found("CPU kernels", str(library), f"compiled kernels for CPUs in {library.parent}")


def python_headers() -> Finding:
    """Python.h of the running interpreter."""
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme names a folder for local packages, which has no headers.
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    header = Path(sysconfig.get_paths(scheme=scheme)["include"], "Python.h")
    if not header.is_file():
        remedy = "install the headers of this Python, e.g. apt install python3-dev; Triton compiles against them"
        return lacking("Python headers", "headers_missing", f"there is no {header}", remedy)
    return found("Python headers", str(header), f"Python headers at {header.parent}")


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


def nvrtc() -> Finding:
    """NVIDIA's run-time compiler: as a package, or in the toolkit that CUDA_HOME or CUDA_PATH names. Not loaded."""
    for name in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12"):
        version = distributions.version_of(name)
        if version:
            return found("NVRTC", version, f"NVRTC {version} ({name})")
    root = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    for library in sorted(Path(root).glob("lib*/libnvrtc.so.*")) if root else ():
        return found("NVRTC", None, f"NVRTC at {library}")
    where = f"no libnvrtc in {root}" if root else "nvidia-cuda-nvrtc is not installed, and CUDA_HOME names no toolkit"
    return lacking(
        "NVRTC", "toolkit_missing", where, "pip install nvidia-cuda-nvrtc, or set CUDA_HOME to a CUDA toolkit"
    )


def nvcc_at(executable: Path) -> Finding:
    """Whether an existing CUDA compiler runs, has matching headers, and makes code that the driver loads."""
    answer = answering(executable)
    if answer.value is None or not answer.ok:
        return answer
    major, minor = answer.value.split(".")
    fitting = of_files(executable, (int(major), int(minor)), driver().value)
    return answer if fitting.ok else fitting


_ANSWER_TIMEOUT_S = 10.0
_SUBJECT = "nvcc"
_SET = "set CUDA_HOME to"
_KILLED = (-9, 137)  # as the process reports it, and as a shell does
# CUDA that a branch of NVIDIA's driver came with, https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/
_CUDA_OF_BRANCH = (
    *((450, (11, 0)), (455, (11, 1)), (460, (11, 2)), (465, (11, 3)), (470, (11, 4)), (495, (11, 5)), (510, (11, 6))),
    *((515, (11, 7)), (520, (11, 8)), (525, (12, 0)), (530, (12, 1)), (535, (12, 2)), (545, (12, 3)), (550, (12, 4))),
    *((555, (12, 5)), (560, (12, 6)), (565, (12, 7)), (570, (12, 8)), (575, (12, 9)), (580, (13, 0))),
)
_BRANCHES_KNOWN = 585  # the CUDA of newer branches is unknown

Version = tuple[int, int]


def answering(nvcc: Path, *, oldest: Version = (0, 0), timeout_s: float = _ANSWER_TIMEOUT_S) -> Finding:
    """The version that a compiler reports.

    Args:
        nvcc: the program.
        oldest: the oldest usable release.
        timeout_s: how long to wait for its output.
    """
    remedy = f"{_SET} another CUDA toolkit; only backends that compile CUDA sources need it"
    try:
        answer = run([nvcc, "--version"], timeout_s)
    except subprocess.TimeoutExpired:
        reason = f"{nvcc} --version did not return within {timeout_s:g} s"
        return lacking(
            _SUBJECT, "toolkit_hangs", reason, "find what blocks it, e.g. a stale file system or a wrapper script"
        )
    except (OSError, ValueError) as error:
        return lacking(_SUBJECT, "toolkit_broken", f"{nvcc} cannot be run: {error}", remedy)
    if answer.returncode in _KILLED:
        reason = f"{nvcc} was killed (exit {answer.returncode})"
        return lacking(_SUBJECT, "toolkit_killed", reason, "check for a memory limit, in dmesg and of the container")
    version = re.search(r"release (\d+)\.(\d+)", answer.stdout)
    if answer.returncode != 0 or version is None:
        reason = f"{nvcc} --version gives no version (exit {answer.returncode})"
        return lacking(_SUBJECT, "toolkit_broken", reason, remedy)
    release = int(version[1]), int(version[2])
    if release < oldest:
        reason = f"{nvcc} is of CUDA {_text(release)}, {_text(oldest)} is needed"
        return lacking(
            _SUBJECT, "toolkit_version", reason, f"{_SET} a toolkit of {_text(oldest)} or newer", _text(release)
        )
    return found(_SUBJECT, _text(release), f"nvcc {_text(release)} at {nvcc}")


def of_files(nvcc: Path, version: Version, driver: str | None) -> Finding:
    """Whether headers and driver match a compiler; nothing is run.

    Args:
        nvcc: the program, ``<toolkit>/bin/nvcc``. If it is outside of a toolkit, such as a script on PATH or a system
            package's, headers are not checked.
        version: version of the compiler.
        driver: version of the machine's NVIDIA driver, e.g. ``"535.104.05"``; None without one.
    """
    root = nvcc.resolve().parent.parent
    is_toolkit = (root / "nvvm").is_dir() or (root / "version.json").is_file()
    wrong = _wrong_with_headers(root / "include", version) if is_toolkit else ""
    if wrong:
        remedy = f"install the headers of CUDA {_text(version)} (cuda-cudart-dev), or {_SET} a whole toolkit"
        return lacking(_SUBJECT, "toolkit_headers", wrong, remedy)
    newest = newest_cuda(driver)
    if newest is not None and version[0] > newest[0]:
        reason = f"nvcc {_text(version)} makes code that driver {driver} (CUDA {_text(newest)}) does not load"
        remedy = f"install a newer driver, or {_SET} a toolkit of CUDA {newest[0]}"
        return lacking(_SUBJECT, "driver_old", reason, remedy)
    return found(_SUBJECT, _text(version), f"CUDA {_text(version)} with its headers")


def newest_cuda(driver: str | None) -> Version | None:
    """The CUDA version that a driver was released with, whose PTX it can compile; None if unknown.

    >>> newest_cuda("535.104.05"), newest_cuda("418.40"), newest_cuda(None)
    ((12, 2), None, None)
    """
    match = re.match(r"\d+", driver or "")
    branch = int(match[0]) if match else 0
    known = [cuda for first, cuda in _CUDA_OF_BRANCH if first <= branch < _BRANCHES_KNOWN]
    return known[-1] if known else None


def _wrong_with_headers(include: Path, version: Version) -> str:
    """What is wrong with a toolkit's headers, as a sentence; empty if nothing is."""
    missing = [name for name in ("cuda_runtime.h", "cuda.h") if not (include / name).is_file()]
    if missing:
        return f"there is no {include / missing[0]}"
    try:
        text = (include / "cuda.h").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"{include / 'cuda.h'} cannot be read: {error.strerror or error}"
    match = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", text)
    of_header = None if match is None else (int(match[1]) // 1000, int(match[1]) % 1000 // 10)
    if of_header is None or of_header == version:
        return ""
    return f"nvcc is of CUDA {_text(version)}, {include / 'cuda.h'} of {_text(of_header)}"


def _text(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
