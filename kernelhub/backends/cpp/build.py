"""The C++ kernels for this CPU: of the wheel, or compiled once per source, compiler and CPU into kernelhub's cache.

`kernelhub.runtime.caches` keeps it: what is loaded was verified, one process compiles while others wait, and a folder
may be shared by machines of several kinds.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import subprocess
from pathlib import Path

from kernelhub.dispatch.work import JOURNAL
from kernelhub.probes import toolchain
from kernelhub.probes.toolchain import run
from kernelhub.runtime.caches.fingerprint import Fingerprint, digest_of, fingerprint
from kernelhub.runtime.caches.store import Entry, Store
from kernelhub.runtime.caches.trusted import load
from kernelhub.runtime.progress import compiling

_PACKAGE = Path(__file__).parents[2]


def _sources() -> Path:
    """The folder of the sources: in a wheel beside the package's modules, in a checkout csrc/cpu."""
    shipped = _PACKAGE / "csrc" / "cpu"
    return shipped if shipped.is_dir() else _PACKAGE.parent / "csrc" / "cpu"


SOURCES = _sources()


class BuildError(Exception):
    """A source did not compile here."""


@functools.cache
def library(source: str) -> ctypes.CDLL:
    """The library of a source of csrc/cpu: the wheel's, which is of all sources, or the one compiled from it here.

    Raises:
        BuildError: there is no compiler, or it fails.
        CacheError: no folder can be written.
        OSError: what was compiled cannot be loaded.
    """
    finding = toolchain.cpu_kernels()
    if finding.value is not None:
        return _shipped(Path(finding.value))
    made, name = _entry(SOURCES / source, None), Path(source).with_suffix(".so").name
    with made.opened(name) as file:  # what is loaded is what was verified, whatever becomes of its path
        return load(file, made.file(name))


# By the answer of kernelhub_cpu_level(), as in setup.py.
LEVELS = ("base", "avx2", "avx512", "avx512bf16")


@functools.cache
def _shipped(base: Path) -> ctypes.CDLL:
    """The wheel's library for the instructions that this CPU has; the base library finds out which."""
    asked = ctypes.CDLL(str(base))
    asked.kernelhub_cpu_level.restype = ctypes.c_int64
    level = LEVELS[asked.kernelhub_cpu_level()]
    return asked if level == "base" else ctypes.CDLL(str(base.with_name(f"libkernelhub_{level}.so")))


def built(source: Path, folder: Path | None = None) -> Path:
    """Path of the compiled source, compiled now if it was not yet.

    Args:
        source: path of the source.
        folder: where to keep it, instead of kernelhub's cache.
    """
    return _entry(source, folder).file(f"{source.stem}.so")


def _entry(source: Path, folder: Path | None) -> Entry:
    finding = toolchain.cxx_compiler()
    if finding.value is None:
        raise BuildError(f"{finding.reason}; {finding.remedy}")
    command = [finding.value, *flags(), f"-I{SOURCES}"]
    name = f"{source.stem}.so"
    store = Store("cpp", made_for(source, command), folder, executable=True)
    patience_s = 2 * JOURNAL.compile_timeout_s
    return store.get(source.stem, lambda making: _compile(command, source, making / name), patience_s=patience_s)


def flags() -> tuple[str, ...]:
    """Compiler flags for the CPU of this machine; the result runs on this kind of CPU only."""
    native = "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native"
    return ("-O3", "-std=c++17", native, "-shared", "-fPIC", "-pthread")


def made_for(source: Path, command: list[str]) -> Fingerprint:
    """Everything that determines the compiled code: sources, flags, the compiler's file, the CPU, the C library."""
    return fingerprint(
        f"cpu-{platform.machine()}",
        sources=(source, *SOURCES.glob("*.h")),
        flags=command[1:-1],
        compiler=command[0],
        cpu=digest_of(_cpu()),
    )


def _compile(command: list[str], source: Path, target: Path) -> None:
    with JOURNAL.doing("compile", source.name, "cpp"), compiling(f"{source.name}, once for this CPU"):
        _run(command, source, target)


def _run(command: list[str], source: Path, target: Path) -> None:
    try:
        answer = run(
            [*command, str(source), "-o", str(target), *_libraries()],
            JOURNAL.compile_timeout_s,
            {**os.environ, "TMPDIR": str(target.parent)},  # the temporary folder may be read-only or full
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{error}; KERNELHUB_COMPILE_TIMEOUT_S sets the time limit of a compiler") from error
    except OSError as error:
        raise BuildError(f"{command[0]} failed to run: {error}") from error
    if answer.returncode != 0 or not target.is_file():
        if "No space left on device" in answer.stderr:
            raise OSError(errno.ENOSPC, f"{command[0]}: no space left on device", str(target))
        said = next((line for line in answer.stderr.splitlines() if "error" in line), answer.stderr.strip()[:300])
        raise BuildError(f"{command[0]} cannot compile {source.name} (exit {answer.returncode}): {said}")


def _libraries() -> tuple[str, ...]:
    return ("-ldl",) if platform.system() == "Linux" else ()


def _cpu() -> str:
    """The instruction sets of the CPU, from its name and flags."""
    words = [platform.machine(), platform.system()]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return " ".join([*words, platform.processor()])
    names = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    return "\n".join([*words, *sorted({line for line in lines if line.startswith(names)})])
