"""Identity of a cache entry: source, flags, compiler, libraries with their files, CUDA, ABI, device.

Everything that affects the result is a named part, so a manifest can report which part differs. File times are not
used: a header edited within a second, or a package reinstalled in the same version, changes the fingerprint.
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
    """Identity of a cache entry.

    Attributes:
        sm: device architecture, a separate folder: ``"sm_90a"``, ``"cpu-x86_64"``, or ``"any"``.
        parts: (name, value) pairs in order of name.
    """

    sm: str
    parts: tuple[tuple[str, str], ...]

    @functools.cached_property
    def digest(self) -> str:
        """Name of the folder of entries with exactly these parts."""
        return digest_of(self.sm, *(word for pair in self.parts for word in pair))[:_DIGITS]

    def difference(self, parts: Mapping[str, str]) -> str:
        """How other parts differ from these, as a phrase; empty if they are equal."""
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
    """The fingerprint of a compiler's output, or of measurements with libraries.

    Args:
        sm: architecture of the device, or ``"any"``.
        sources: source files and headers; names and contents count.
        flags: flags of the compiler, without paths that differ between machines.
        compiler: path of the compiler's executable; its contents count.
        libraries: import names of packages; version and files count.
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
    """The requirements of a library compiled here on another machine: system, processor family, C library."""
    libc = ""
    if "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", {}):
        libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    return " ".join(filter(None, (platform.system(), platform.machine(), libc)))


def version_of(distribution: str) -> str:
    """Version of an installed distribution, as stored in fingerprints; ``"none"`` without it.

    For torch, its own version string, which names the build, such as +cu130; the metadata of its wheels may not.
    """
    if distribution == "torch":
        return torch_build().version
    return distributions.version_of(distribution) or "none"


def library(name: str) -> str:
    """Version of an installed package and a digest of its files, as they were installed; ``"absent"`` without it.

    The digest is that of the installer's record, which lists a hash of every file. For a package without a record (an
    editable installation) it covers names, sizes and times of its Python files.
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
    stats = [f"{path} {info.st_size} {info.st_mtime_ns}" for path in files for info in (path.stat(),)]
    return f"{version} {digest_of(str(spec.origin), *stats)[:_DIGITS]}"


def files_digest(paths: Iterable[Path]) -> str:
    """Digest of names and contents, in the given order."""
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
    """As `file_digest`, of an open file; its position does not change."""
    digest, at = hashlib.sha256(), 0
    while block := os.pread(file, 1 << 20, at):
        digest.update(block)
        at += len(block)
    return digest.hexdigest()


def digest_of(*words: str) -> str:
    """SHA-256 of words, in hexadecimal; the boundaries between words count."""
    digest = hashlib.sha256()
    for word in words:
        encoded = word.encode()
        digest.update(f"{len(encoded)}\0".encode())
        digest.update(encoded)
    return digest.hexdigest()


def _short(value: str | None) -> str:
    return "without" if value is None else value if len(value) <= 60 else f"{value[:28]}...{value[-28:]}"
