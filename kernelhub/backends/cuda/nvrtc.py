"""Compiling a CUDA source of ours by NVRTC, once per source, constants, device and compiler, into kernelhub's cache.

A device that is newer than NVRTC gets PTX of the newest older architecture, which the driver compiles. Headers
are passed by their contents, so that nothing depends on a path. `kernelhub.runtime.caches` keeps the result: what is
loaded was verified, and one process compiles while others wait.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kernelhub.dispatch.work import JOURNAL
from kernelhub.runtime.caches.fingerprint import fingerprint, version_of
from kernelhub.runtime.caches.store import Store
from kernelhub.runtime.progress import compiling

_PACKAGE = Path(__file__).parents[2]
_DISTRIBUTIONS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc-cu13")

Constants = Mapping[str, str | int]


def _sources() -> Path:
    """The folder of the sources: in a wheel beside the package's modules, in a checkout csrc/cuda."""
    shipped = _PACKAGE / "csrc" / "cuda"
    return shipped if shipped.is_dir() else _PACKAGE.parent / "csrc" / "cuda"


SOURCES = _sources()


class CompileError(Exception):
    """A source did not compile here."""


class Compiler(NamedTuple):
    """NVRTC as it is installed.

    Attributes:
        nvrtc: the module of cuda-bindings.
        version: CUDA version, and that of the package which has the library.
        architectures: numbers of those that it compiles for, such as 90, in order.
    """

    nvrtc: Any
    version: str
    architectures: tuple[int, ...]


@functools.cache
def compiler() -> Compiler:
    """NVRTC, loaded once.

    Raises:
        CompileError: cuda-bindings cannot load it.
    """
    try:
        from cuda.bindings import nvrtc

        major, minor = _checked(nvrtc, nvrtc.nvrtcVersion())
        (numbers,) = _checked(nvrtc, nvrtc.nvrtcGetSupportedArchs())
    except CompileError:
        raise
    except Exception as error:  # of its loader, whose class differs by release
        raise CompileError(f"cuda-bindings cannot load NVRTC: {error}") from error
    packages = [f"{name} {version_of(name)}" for name in _DISTRIBUTIONS if version_of(name) != "none"]
    return Compiler(nvrtc, ", ".join([f"{major}.{minor}", *packages]), tuple(sorted(numbers)))


def target(capability: tuple[int, int], architectures: tuple[int, ...]) -> str:
    """``"sm_90"`` for a device that NVRTC compiles for; for a newer one ``"compute_N"``, which the driver compiles.

    Raises:
        CompileError: the device is older than all of them.
    """
    number = 10 * capability[0] + capability[1]
    if number in architectures:
        return f"sm_{number}"
    older = [known for known in architectures if known < number]
    if not older:
        raise CompileError(f"NVRTC compiles for sm_{min(architectures, default=0)} and later, not for sm_{number}")
    return f"compute_{max(older)}"


def compiled(
    source: str,
    constants: Constants,
    capability: tuple[int, int],
    folder: Path | None = None,
    specific: bool = False,
) -> bytes:
    """The binary (PTX for a device newer than NVRTC) of a source of csrc/cuda, compiled now if it was not yet.

    Args:
        source: name of the file.
        constants: macros that are defined.
        capability: of the device.
        folder: where to keep it, instead of kernelhub's cache.
        specific: with the instructions that no later architecture has (sm_90a).

    Raises:
        CompileError: NVRTC is missing, or refuses the source.
        CacheError: no folder can be written.
    """
    made_by, path = compiler(), SOURCES / source
    options = options_for(constants, target(capability, made_by.architectures) + ("a" if specific else ""))
    headers = sorted(SOURCES.glob("*.h"))
    key = fingerprint(
        f"sm_{capability[0]}{capability[1]}", sources=(path, *headers), flags=options, nvrtc=made_by.version
    )
    store, name = Store("nvrtc", key, folder), f"{path.stem}.bin"

    def make(making: Path) -> None:
        with JOURNAL.doing("compile", source, "cuda"), compiling(f"{source}, once for this GPU"):
            (making / name).write_bytes(_compile(made_by.nvrtc, path, headers, options))

    entry = store.get(path.stem, make, patience_s=2 * JOURNAL.compile_timeout_s)
    with entry.opened(name) as file, open(file, "rb", closefd=False) as content:
        return content.read()


def options_for(constants: Constants, architecture: str) -> tuple[str, ...]:
    """NVRTC's options."""
    return (
        f"-arch={architecture}",
        "-std=c++17",
        "-diag-suppress=177",
        *(f"-D{name}={value}" for name, value in sorted(constants.items())),
    )


def _compile(nvrtc: Any, path: Path, headers: list[Path], options: tuple[str, ...]) -> bytes:
    names = [header.name.encode() for header in headers]
    contents = [header.read_bytes() for header in headers]
    (program,) = _checked(
        nvrtc, nvrtc.nvrtcCreateProgram(path.read_bytes(), path.name.encode(), len(headers), contents, names)
    )
    try:
        words = [option.encode() for option in options]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(words), words)
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            said = _read(nvrtc, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            lines = said.rstrip(b"\0").decode(errors="replace").splitlines()
            first = next((line for line in lines if "error" in line), " ".join(lines)[:300])
            raise CompileError(f"NVRTC cannot compile {path.name} ({' '.join(options)}): {first}")
        if options[0].startswith("-arch=sm_"):
            return _read(nvrtc, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        return _read(nvrtc, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(nvrtc: Any, size_of: Any, fill: Any, program: Any) -> bytes:
    (size,) = _checked(nvrtc, size_of(program))
    made = bytes(size)  # written in place by cuda-bindings; larger than what CPython shares between its users
    _checked(nvrtc, fill(program, made))
    return made


def _checked(nvrtc: Any, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """The results of a call of cuda-bindings, which are behind its status."""
    status, *results = answer
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC failed with {status!r}")
    return tuple(results)
