"""What lies in kernelhub's own places: entries, documents, locks, and what killed processes left."""

from __future__ import annotations

import ast
import re
import socket
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kernelhub.probes import document
from kernelhub.probes.finding import Finding
from kernelhub.probes.package import spec_of
from kernelhub.runtime.caches import manifest, root
from kernelhub.runtime.caches.fingerprint import file_digest, host_abi, library, version_of
from kernelhub.runtime.caches.inventory import (
    BROKEN,
    BUSY,
    CURRENT,
    ELSEWHERE,
    LEFTOVER,
    STALE,
    UNKNOWN,
    Cache,
    Item,
    entries,
    folders,
    unfinished,
    weighed,
)
from kernelhub.runtime.caches.lock import STALE_AFTER_S, Holder
from kernelhub.runtime.caches.manifest import Flaw
from kernelhub.runtime.caches.trusted import Tree
from kernelhub.runtime.caches.variables import LIBRARIES, NOTE

_DIGEST = re.compile(r"[0-9a-f]{24}")
_DISTRIBUTION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}")
_MOST_BYTES = 1 << 30  # of a compiler
_OF_A_WRITER = re.compile(r"\..+\.(making|bad)-[0-9a-f]{32}|\..+\.lock-([0-9a-f]{32}|breaker)")


def caches(*, thorough: bool = False) -> list[Cache]:
    """Each of our places that is read, or the one that would be made.

    Where a folder is named and can be filled, what lies in the user's own is read by nobody who names it, and left.

    Args:
        thorough: verify the contents of every file, not only the manifests.
    """
    there = root.readable() or [place for place in root.places() if root.judged(place, False).ok][:1]
    refused = [(place, why[1]) for place in root.places() if place not in there and (why := place.refused())]
    here = manifest.version()
    return [
        *(Cache("kernelhub", place.path, root.VARIABLE, here, weighed(_items(place, thorough))) for place in there),
        *(Cache("kernelhub", place.path, root.VARIABLE, here, (), f"not read: {why}") for place, why in refused),
    ]


def _items(place: root.Place, thorough: bool) -> Iterator[Item]:
    for folder in (made for kind in folders(place.path) for sm in folders(kind) for made in folders(sm)):
        if not _DIGEST.fullmatch(folder.name):
            continue
        if folder.parent.parent.name == LIBRARIES:
            yield _of_a_library(folder, place.tree())
        else:
            yield from filter(None, (_item(path, place.tree(), thorough) for path in entries(folder)))


def _of_a_library(folder: Path, tree: Tree) -> Item:
    """The folder of a library whose variable leads here; what is in it is the library's."""
    content = manifest.read(folder / NOTE, tree)
    if isinstance(content, Flaw):
        return Item(folder, UNKNOWN, content.sentence)
    differs = _difference(content["parts"])
    if not differs:
        return Item(folder, CURRENT)
    here = content.get("made", {}).get("host") == socket.gethostname()
    return Item(folder, STALE if here else ELSEWHERE, differs)


def _item(path: Path, tree: Tree, thorough: bool) -> Item | None:
    if path.is_symlink():
        return Item(path, BROKEN, "it is a symbolic link", "entry_symlink")
    if _OF_A_WRITER.fullmatch(path.name):
        return unfinished(path, "its writer was ended")
    if path.name.endswith(".lock"):
        return _lock(path)
    if path.is_dir():
        content = manifest.verify(path, tree) if thorough else manifest.read(path / manifest.NAME, tree)
        return _judged(path, content)
    return _judged(path, manifest.read(path, tree)) if path.suffix == ".json" else None


def _lock(path: Path) -> Item:
    holder = Holder.read(path)
    try:
        age_s = time.time() - path.lstat().st_mtime
    except OSError:  # given up at this moment
        return Item(path, BUSY, "it was held a moment ago")
    if holder is not None and (holder.ended() is None if holder.is_here() else age_s < STALE_AFTER_S):
        return Item(path, BUSY, f"held by {holder}")
    return Item(path, LEFTOVER, f"a lock that {holder or 'nobody'} held {age_s:.0f} s ago")


def _judged(path: Path, content: dict[str, Any] | Flaw) -> Item:
    if isinstance(content, Flaw):
        return Item(path, BROKEN, content.sentence, content.code)
    made, differs = content.get("made", {}), _difference(content["parts"])
    host, version = made.get("host"), made.get("kernelhub")
    if differs and host != socket.gethostname():
        return Item(path, ELSEWHERE, f"made on {host}: {differs}")
    if differs:
        return Item(path, STALE, differs)
    if version != manifest.version():
        return Item(path, STALE, f"made by kernelhub {version}, this is {manifest.version()}")
    return Item(path, CURRENT)


def _difference(parts: dict[str, str]) -> str:
    """Which part of a fingerprint is no longer so here, of those that can be asked again."""
    for part, value in parts.items():
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
            if not name.isidentifier():  # to look for a submodule would import its package
                return f"with {name!r}, which names no package"
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
        return f"with other files of {name} {version} than are installed"
    return f"with {name} {version}, {now} is installed"


def _version(distribution: str) -> str:
    """As it is written of what was measured with it."""
    if not _DISTRIBUTION.fullmatch(distribution):
        return "none"
    if distribution == "kernelhub":
        return manifest.version()
    return _torch_version() if distribution == "torch" and "torch" not in sys.modules else version_of(distribution)


def _torch_version() -> str:
    """What torch would say of itself, read from its source: a listing imports nothing."""
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
