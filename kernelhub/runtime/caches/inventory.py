"""Inventory of the caches of this machine, kernelhub's and those of libraries: paths, sizes, and unusable entries.

A recognised entry is a `CacheItem`, and only items are removed. Parent folders, targets of symbolic links and entries
of unknown form stay.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import re
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelhub.probes import document
from kernelhub.probes.finding import Finding
from kernelhub.probes.package import spec_of
from kernelhub.runtime.caches import manifest, root
from kernelhub.runtime.caches.fingerprint import file_digest, host_abi, library, version_of
from kernelhub.runtime.caches.lock import STALE_AFTER_S, Holder
from kernelhub.runtime.caches.manifest import Flaw
from kernelhub.runtime.caches.trusted import Tree
from kernelhub.runtime.caches.variables import LIBRARIES, NOTE

CURRENT = "current"  # what is installed here would use it
STALE = "stale"  # another version made it; no installed version reads it
BROKEN = "broken"  # incomplete or changed; a reader fails or makes it again
LEFTOVER = "leftover"  # from a process that was killed
BUSY = "busy"  # a process is making it now
ELSEWHERE = "elsewhere"  # another machine made it, for itself
UNKNOWN = "unknown"  # its maker is not recorded
USELESS = (STALE, BROKEN, LEFTOVER)
_YOUNG_S = 3600.0  # five times the longest known build


@dataclass(frozen=True)
class CacheItem:
    """One entry of a cache that can be removed separately.

    Attributes:
        path: a file or folder.
        state: ``"current"``, ``"stale"``, ``"broken"``, ``"leftover"``, ``"busy"``, ``"elsewhere"`` or ``"unknown"``.
        reason: why, as a sentence; empty if the state is enough.
        code: code of the fault, a key of `notices.CODES`, for kernelhub's entries.
        num_bytes: size of its files.
    """

    path: Path
    state: str
    reason: str = ""
    code: str = ""
    num_bytes: int = 0


@dataclass(frozen=True)
class Cache:
    """One cache.

    Attributes:
        name: ``"kernelhub"``, ``"triton"``, ``"flashinfer"``, ``"deep_gemm"``, ``"vllm"`` or ``"inductor"``.
        path: its path, whether or not it exists.
        variable: environment variable that moves it.
        installed: version of the library, or None without it.
        items: its entries.
        problem: why it was not read; empty if it was.
    """

    name: str
    path: Path
    variable: str
    installed: str | None
    items: tuple[CacheItem, ...]
    problem: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of all items."""
        return sum(item.num_bytes for item in self.items)

    def useless(self) -> tuple[CacheItem, ...]:
        """Items that nothing on this machine will read."""
        return tuple(item for item in self.items if item.state in USELESS)


def unfinished(path: Path, reason: str) -> CacheItem:
    """An unfinished entry: a leftover, unless it is recent enough that a process may still write it."""
    try:
        young = time.time() - path.lstat().st_mtime < _YOUNG_S
    except OSError:
        young = True  # renamed or removed in the meantime
    return CacheItem(path, BUSY, "a process may be writing it") if young else CacheItem(path, LEFTOVER, reason)


def folders(path: Path) -> Iterator[Path]:
    """The folders in a folder, without links, in order; none if it does not exist."""
    yield from (entry for entry in entries(path) if is_folder(entry))


def is_folder(path: Path) -> bool:
    """Whether a path is a folder and not a link to one; False if it cannot be read."""
    return os.path.isdir(path) and not os.path.islink(path)


def entries(path: Path) -> list[Path]:
    """The entries of a folder, in order; none if it does not exist or cannot be read."""
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def weighed(items: Iterable[CacheItem]) -> tuple[CacheItem, ...]:
    """The items with their sizes."""
    return tuple(CacheItem(item.path, item.state, item.reason, item.code, size_of(item.path)) for item in items)


def size_of(path: Path) -> int:
    """Bytes of a file, or of the files below a folder. Links are not followed."""
    if not is_folder(path):
        with contextlib.suppress(OSError):  # removed in the meantime, or not readable
            return path.lstat().st_size
        return 0
    num_bytes, left = 0, [str(path)]
    while left:
        with contextlib.suppress(OSError), os.scandir(left.pop()) as found:
            for entry in found:
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)
                else:
                    num_bytes += entry.stat(follow_symlinks=False).st_size
    return num_bytes


def remove(cache: Cache, item: CacheItem) -> str:
    """Remove an item; returns why it was left, or an empty text.

    An item is left if it is a symbolic link or is reached through one, so that nothing outside of the cache changes.
    """
    if item.state == BUSY:
        return item.reason
    root = Path(os.path.realpath(cache.path))
    try:
        inside = item.path.relative_to(cache.path)
    except ValueError:
        return f"{item.path} is not in {cache.path}"
    if not inside.parts or ".." in inside.parts:
        return f"{item.path} is not in {cache.path}"
    path = root / inside
    if os.path.islink(path) or Path(os.path.realpath(path)) != path:
        return f"{item.path} is a symbolic link or is reached through one"
    try:
        if os.path.isdir(path):
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{error.filename or path}: {error.strerror or error}"
    except RecursionError:  # shutil calls itself for each folder, before Python 3.13
        return f"{path} nests too deeply; remove it with rm -r"
    return ""


Differs = Callable[[str, str], str]  # how a part of a fingerprint, by name and value, differs from this machine
_DIGEST = re.compile(r"[0-9a-f]{24}")
_DISTRIBUTION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}")
_MOST_BYTES = 1 << 30  # of a compiler's executable
_OF_A_WRITER = re.compile(r"\..+\.(making|bad)-[0-9a-f]{32}|\..+\.lock-([0-9a-f]{32}|breaker)")


def caches(*, thorough: bool = False) -> list[Cache]:
    """Each of our readable places, or the one that would be made.

    If a folder is set and writable, the folder in the user's home is not read, and is left out.

    Args:
        thorough: verify the contents of every file, not only the manifests.
    """
    differs = functools.cache(_differs)  # many entries have the same parts, and reading a library's files takes time
    there = root.readable() or [place for place in root.places() if root.judged(place, False).ok][:1]
    refused = [(place, why[1]) for place in root.places() if place not in there and (why := place.refused())]
    here = manifest.version()
    return [
        *(
            Cache("kernelhub", place.path, root.VARIABLE, here, weighed(_items(place, thorough, differs)))
            for place in there
        ),
        *(Cache("kernelhub", place.path, root.VARIABLE, here, (), f"not read: {why}") for place, why in refused),
    ]


def _items(place: root.Place, thorough: bool, differs: Differs) -> Iterator[CacheItem]:
    for folder in (made for kind in folders(place.path) for sm in folders(kind) for made in folders(sm)):
        if not _DIGEST.fullmatch(folder.name):
            continue
        if folder.parent.parent.name == LIBRARIES:
            yield _of_a_library(folder, place.tree(), differs)
        else:
            yield from filter(None, (_item(path, place.tree(), thorough, differs) for path in entries(folder)))


def _of_a_library(folder: Path, tree: Tree, differs: Differs) -> CacheItem:
    """The folder of a library whose variable points here; its contents are the library's."""
    content = manifest.read(folder / NOTE, tree)
    if isinstance(content, Flaw):
        return CacheItem(folder, UNKNOWN, content.sentence)
    difference = _difference(content["parts"], differs)
    if not difference:
        return CacheItem(folder, CURRENT)
    here = content.get("made", {}).get("host") == socket.gethostname()
    return CacheItem(folder, STALE if here else ELSEWHERE, difference)


def _item(path: Path, tree: Tree, thorough: bool, differs: Differs) -> CacheItem | None:
    if path.is_symlink():
        return CacheItem(path, BROKEN, "it is a symbolic link", "entry_symlink")
    if _OF_A_WRITER.fullmatch(path.name):
        return unfinished(path, "its writer was killed")
    if path.name.endswith(".lock"):
        return _lock(path)
    if path.is_dir():
        content = manifest.verify(path, tree) if thorough else manifest.read(path / manifest.NAME, tree)
        return _judged(path, content, differs)
    return _judged(path, manifest.read(path, tree), differs) if path.suffix == ".json" else None


def _lock(path: Path) -> CacheItem:
    holder = Holder.read(path)
    try:
        age_s = time.time() - path.lstat().st_mtime
    except OSError:  # released in the meantime
        return CacheItem(path, BUSY, "it was held a moment ago")
    if holder is not None and (holder.ended() is None if holder.is_here() else age_s < STALE_AFTER_S):
        return CacheItem(path, BUSY, f"held by {holder}")
    return CacheItem(path, LEFTOVER, f"a lock that {holder or 'an unnamed process'} held {age_s:.0f} s ago")


def _judged(path: Path, content: dict[str, Any] | Flaw, differs: Differs) -> CacheItem:
    if isinstance(content, Flaw):
        return CacheItem(path, BROKEN, content.sentence, content.code)
    made, difference = content.get("made", {}), _difference(content["parts"], differs)
    host, version = made.get("host"), made.get("kernelhub")
    if difference and host != socket.gethostname():
        return CacheItem(path, ELSEWHERE, f"made on {host}: {difference}")
    if difference:
        return CacheItem(path, STALE, difference)
    if version != manifest.version():
        return CacheItem(path, STALE, f"made by kernelhub {version}, this is {manifest.version()}")
    return CacheItem(path, CURRENT)


def _difference(parts: dict[str, str], differs: Differs) -> str:
    """The first part of a fingerprint that no longer matches this machine, among those that can be computed again."""
    return next(filter(None, (differs(*part) for part in parts.items())), "")


def _differs(part: str, value: str) -> str:
    """How a part of a fingerprint differs from this machine."""
    about, _, name = part.rpartition(" ")
    if part == "abi" and value != host_abi():
        return f"for {value}, this is {host_abi()}"
    if part == "compiler":
        executable, _, digest = value.rpartition(" ")
        if not _is_compiler(Path(executable), digest):
            return f"by another compiler than is now at {executable}"
    if about == "version":
        now = _version(name)
        if now != value:
            return f"with {name} {value}, {now} is installed"
    if about == "library":
        if not name.isidentifier():  # a search for a submodule would import its package
            return f"with {name!r}, which is not a package name"
        now = library(name)
        if now != value:
            return _other_library(name, value.partition(" ")[0], now.partition(" ")[0])
    return ""


def _is_compiler(path: Path, digest: str) -> bool:
    try:
        info = path.stat()
        return stat.S_ISREG(info.st_mode) and info.st_size <= _MOST_BYTES and file_digest(path) == digest
    except (OSError, ValueError):
        return False


def _other_library(name: str, version: str, now: str) -> str:
    if version == now:
        return f"with files of {name} {version} that differ from the installed ones"
    return f"with {name} {version}, {now} is installed"


def _version(distribution: str) -> str:
    """The version as fingerprints of measurements contain it."""
    if not _DISTRIBUTION.fullmatch(distribution):
        return "none"
    if distribution == "kernelhub":
        return manifest.version()
    return _torch_version() if distribution == "torch" and "torch" not in sys.modules else version_of(distribution)


def _torch_version() -> str:
    """torch's own version string, read from its source, since a listing imports nothing."""
    spec = spec_of("torch")
    if spec is None or isinstance(spec, Finding) or not spec.origin:
        return "none"
    try:
        for node in ast.parse(document.text(Path(spec.origin).with_name("version.py"))).body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and ast.unparse(node).startswith("__version__"):
                return str(ast.literal_eval(node.value)) if node.value is not None else "none"
    except (OSError, ValueError, SyntaxError):
        pass
    return "none"
