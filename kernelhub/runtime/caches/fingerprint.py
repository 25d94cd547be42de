"""For what something was made: source, flags, compiler, libraries with their files, CUDA, ABI, device.

All that decides what comes out is a named part, so a manifest can say which part differs. Nothing is told from times
of files: a header edited within a second, or a package installed again in the same version, is another fingerprint.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kernelhub.probes import distributions
from kernelhub.probes.finding import Finding
from kernelhub.probes.package import spec_of
from kernelhub.probes.torch_build import torch_build

_DIGITS = 24  # hexadecimal digits of a digest in a folder's name: 96 bits


@dataclass(frozen=True)
class Fingerprint:
    """For what something was made.

    Attributes:
        sm: device architecture, a folder of its own: ``"sm_90a"``, ``"cpu-x86_64"``, or ``"any"``.
        parts: (name, value) pairs in order of name.
    """

    sm: str
    parts: tuple[tuple[str, str], ...]

    @functools.cached_property
    def digest(self) -> str:
        """Name of the folder of what was made for exactly these parts."""
        return digest_of(self.sm, *(word for pair in self.parts for word in pair))[:_DIGITS]

    def difference(self, parts: Mapping[str, str]) -> str:
        """How other parts differ from these, as a phrase; empty if they do not."""
        mine = dict(self.parts)
        names = [name for name in sorted({*mine, *parts}) if mine.get(name) != parts.get(name)]
        return ", ".join(f"{name} {_short(parts.get(name))}, not {_short(mine.get(name))}" for name in names)


def fingerprint(
    sm: str,
    *,
    sources: Iterable[Path] = (),
    flags: Iterable[str] = (),
    compiler: str | None = None,
    libraries: Iterable[str] = (),
    **more: str,
) -> Fingerprint:
    """The fingerprint of what a compiler makes of sources, or of what is measured with libraries.

    Args:
        sm: architecture of the device, or ``"any"``.
        sources: files whose names and contents decide, headers included.
        flags: of the compiler, without paths that differ between machines.
        compiler: path of the compiler's executable; its contents decide.
        libraries: import names of packages whose version and files decide.
        more: further parts by name, such as ``cuda="13.0"``, ``driver="580.65"``, ``nvrtc="13.0.88"``.

    Raises:
        OSError: a source or the compiler cannot be read.
    """
    parts = {"abi": host_abi(), **more}
    paths = sorted(sources)
    if paths:
        parts["source"] = files_digest(paths)
    words = tuple(flags)
    if words:
        parts["flags"] = " ".join(words)
    if compiler is not None:
        executable = Path(compiler).resolve()
        parts["compiler"] = f"{executable} {file_digest(executable)}"
    for name in libraries:
        parts[f"library {name}"] = library(name)
    return Fingerprint(sm, tuple(sorted(parts.items())))


def host_abi() -> str:
    """What a library compiled on this machine needs of another: system, processor family, C library."""
    libc = ""
    if "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", {}):
        libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    return " ".join(filter(None, (platform.system(), platform.machine(), libc)))


def version_of(distribution: str) -> str:
    """Version of an installed distribution, as it is written of what was made with it; ``"none"`` without it.

    Of torch what it says itself, which names the build, such as +cu130; its wheels need not.
    """
    if distribution == "torch":
        return torch_build().version
    return distributions.version_of(distribution) or "none"


def library(name: str) -> str:
    """Version of an installed package and a digest of its files, as they were installed; ``"absent"`` without it.

    The digest is that of the installer's record, which lists a hash of every file. A package without one (an editable
    installation) is told by the names, sizes and times of its Python files.
    """
    version = "unknown"
    distribution = distributions.distribution(name) or next(iter(distributions.distributions_of(name)), None)
    if distribution is not None:
        version = distribution.version or version
        record = distribution.record()
        if ".py," in record:
            return f"{version} {digest_of(record)[:_DIGITS]}"
    spec = spec_of(name)
    if spec is None or isinstance(spec, Finding):
        return "absent"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    told = [f"{path} {info.st_size} {info.st_mtime_ns}" for path in files for info in (path.stat(),)]
    return f"{version} {digest_of(str(spec.origin), *told)[:_DIGITS]}"


def files_digest(paths: Iterable[Path]) -> str:
    """Of names and contents, in the order given."""
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:_DIGITS]


def file_digest(path: Path) -> str:
    """SHA-256 of a file's contents, in hexadecimal."""
    with path.open("rb") as file:
        return descriptor_digest(file.fileno())


def descriptor_digest(file: int) -> str:
    """As `file_digest`, of a file that is open; where it is read next does not change."""
    digest, at = hashlib.sha256(), 0
    while block := os.pread(file, 1 << 20, at):
        digest.update(block)
        at += len(block)
    return digest.hexdigest()


def digest_of(*words: str) -> str:
    """SHA-256 of words, in hexadecimal; where one ends and the next begins counts."""
    digest = hashlib.sha256()
    for word in words:
        encoded = word.encode()
        digest.update(f"{len(encoded)}\0".encode())
        digest.update(encoded)
    return digest.hexdigest()


def _short(value: str | None) -> str:
    return "without" if value is None else value if len(value) <= 60 else f"{value[:28]}...{value[-28:]}"
