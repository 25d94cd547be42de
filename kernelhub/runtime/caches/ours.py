"""What lies in kernelhub's own places: entries, documents, locks, and what killed processes left."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kernelhub.runtime.caches import manifest, root
from kernelhub.runtime.caches.fingerprint import file_digest, host_abi, library, version_of
from kernelhub.runtime.caches.holder import Holder
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
from kernelhub.runtime.caches.lock import STALE_AFTER_S
from kernelhub.runtime.caches.manifest import Flaw
from kernelhub.runtime.caches.variables import LIBRARIES, NOTE

_DIGEST = re.compile(r"[0-9a-f]{24}")
_OF_A_WRITER = re.compile(r"\..+\.(making|bad)-[0-9a-f]{32}|\..+\.lock-([0-9a-f]{32}|breaker)")


def caches(*, thorough: bool = False) -> list[Cache]:
    """Each of our places that is read, or the one that would be made.

    Where a folder is named and can be filled, what lies in the user's own is read by nobody who names it, and left.

    Args:
        thorough: verify the contents of every file, not only the manifests.
    """
    there = root.readable() or [place for place in root.places() if place.judge().ok][:1]
    return [
        Cache("kernelhub", place.path, root.VARIABLE, manifest.version(), weighed(_items(place, thorough)))
        for place in there
    ]


def _items(place: root.Place, thorough: bool) -> Iterator[Item]:
    for folder in (made for kind in folders(place.path) for sm in folders(kind) for made in folders(sm)):
        if not _DIGEST.fullmatch(folder.name):
            continue
        if folder.parent.parent.name == LIBRARIES:
            yield _of_a_library(folder)
        else:
            yield from filter(None, (_item(path, thorough) for path in entries(folder)))


def _of_a_library(folder: Path) -> Item:
    """The folder of a library whose variable leads here; what is in it is the library's."""
    content = _read(folder / NOTE)
    if isinstance(content, Flaw):
        return Item(folder, UNKNOWN, content.sentence)
    differs = _difference(content["parts"])
    if not differs:
        return Item(folder, CURRENT)
    here = content.get("made", {}).get("host") == socket.gethostname()
    return Item(folder, STALE if here else ELSEWHERE, differs)


def _item(path: Path, thorough: bool) -> Item | None:
    if path.is_symlink():
        return Item(path, BROKEN, "it is a symbolic link", "entry_symlink")
    if _OF_A_WRITER.fullmatch(path.name):
        return unfinished(path, "its writer was ended")
    if path.name.endswith(".lock"):
        return _lock(path)
    if path.is_dir():
        content = manifest.verify(path) if thorough else _read(path / manifest.NAME)
        return _judged(path, content)
    return _judged(path, _read(path)) if path.suffix == ".json" else None


def _read(path: Path) -> dict[str, Any] | Flaw:
    try:
        return manifest.read(path)
    except OSError as error:
        return Flaw("entry_unreadable", f"{path}: {error.strerror or error}")


def _lock(path: Path) -> Item:
    holder = Holder.read(path)
    age_s = time.time() - path.lstat().st_mtime
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
    for name, value in parts.items():
        if name == "abi" and value != host_abi():
            return f"for {value}, this is {host_abi()}"
        if name == "compiler":
            executable, _, digest = value.rpartition(" ")
            if not os.path.isfile(executable) or file_digest(Path(executable)) != digest:
                return f"by another compiler than is now at {executable}"
        if name.startswith("version "):
            now = _version(name.removeprefix("version "))
            if now != value:
                return f"with {name.removeprefix('version ')} {value}, {now} is installed"
        if name.startswith("library "):
            now = library(name.removeprefix("library "))
            if now != value:
                return _other_library(name.removeprefix("library "), value.split()[0], now.split()[0])
    return ""


def _other_library(name: str, version: str, now: str) -> str:
    if version == now:
        return f"with other files of {name} {version} than are installed"
    return f"with {name} {version}, {now} is installed"


def _version(distribution: str) -> str:
    """As it is written of what was measured with it."""
    return manifest.version() if distribution == "kernelhub" else version_of(distribution)
