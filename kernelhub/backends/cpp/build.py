"""Compiling a C++ source of ours for this CPU, once per source, compiler and CPU, into kernelhub's cache folder.

The library's name is a digest of all that it depends on, so nothing in the folder can be out of date, and it is made
under another name and renamed, so nothing in it is half written. A folder may be shared by machines and processes.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

from kernelhub.dispatch.work import JOURNAL
from kernelhub.probes import cache, compiler

_HERE = Path(__file__).parent
_TIMEOUT_S = 300.0


class BuildError(Exception):
    """A source did not compile here."""


@functools.cache
def library(source: str) -> ctypes.CDLL:
    """The library made of a source, which is named relative to this folder.

    Raises:
        BuildError: there is no compiler, or it fails.
        OSError: the cache folder cannot be written, or what was compiled cannot be loaded.
    """
    return ctypes.CDLL(str(built(_HERE / source)))


def built(source: Path, folder: Path | None = None) -> Path:
    """Path of the compiled source, compiled now if it was not yet."""
    finding = compiler.cxx_compiler()
    if finding.value is None:
        raise BuildError(f"{finding.reason}; {finding.remedy}")
    command = [finding.value, *flags()]
    folder = (cache.kernelhub_cache_folder() if folder is None else folder) / "cpp"
    target = folder / f"{source.stem}-{_digest(source, command)}.so"
    if not target.is_file():
        _compile(command, source, target)
    return target


def flags() -> tuple[str, ...]:
    """For the CPU that this runs on: nothing compiled here runs elsewhere."""
    native = "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native"
    return ("-O3", "-std=c++17", native, "-shared", "-fPIC", "-pthread", f"-I{_HERE}")


def _compile(command: list[str], source: Path, target: Path) -> None:
    with JOURNAL.doing("compile", source.name, "cpp"):
        _run(command, source, target)


def _run(command: list[str], source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="making-") as place:
        made = Path(place) / target.name
        try:
            answer = subprocess.run(
                [*command, str(source), "-o", str(made), *_libraries()],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"{command[0]} does not answer: {error}") from error
        if answer.returncode != 0 or not made.is_file():
            said = next((line for line in answer.stderr.splitlines() if "error" in line), answer.stderr.strip()[:300])
            raise BuildError(f"{command[0]} cannot compile {source.name} (exit {answer.returncode}): {said}")
        os.replace(made, target)


def _libraries() -> tuple[str, ...]:
    return ("-ldl",) if platform.system() == "Linux" else ()


def _digest(source: Path, command: list[str]) -> str:
    """Of everything that decides what comes out: sources, flags, the compiler's file, the CPU."""
    digest = hashlib.sha256()
    for path in (source, *sorted(_HERE.glob("*.h"))):
        digest.update(path.read_bytes())
    executable = Path(command[0]).resolve()
    told = executable.stat()
    digest.update(repr((executable, told.st_size, told.st_mtime_ns, command[1:-1], _cpu())).encode())
    return digest.hexdigest()[:24]


def _cpu() -> str:
    """What the CPU can do, by its name and its flags."""
    words = [platform.machine(), platform.system()]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return " ".join([*words, platform.processor()])
    names = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    return "\n".join([*words, *sorted({line for line in lines if line.startswith(names)})])
