"""What lies in the caches of this machine, ours and those of the libraries: where, how much, and what is of no use.

Only what is recognised is an `Item`, and only items are ever removed: not the folders they lie in, nothing that a
symbolic link leads to, nothing whose form nobody here knows.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

CURRENT = "current"  # what is installed here would use it
STALE = "stale"  # another version made it, nothing here reads it again
BROKEN = "broken"  # incomplete or changed; whoever reads it fails or makes it again
LEFTOVER = "leftover"  # of a process that was killed
BUSY = "busy"  # a process is making it now
ELSEWHERE = "elsewhere"  # another machine made it, for itself
UNKNOWN = "unknown"  # it does not say who made it
USELESS = (STALE, BROKEN, LEFTOVER)
_YOUNG_S = 3600.0  # the longest build known takes a fifth of it


@dataclass(frozen=True)
class Item:
    """One thing in a cache that can be removed by itself.

    Attributes:
        path: a file or folder.
        state: ``"current"``, ``"stale"``, ``"broken"``, ``"leftover"``, ``"busy"``, ``"elsewhere"`` or ``"unknown"``.
        reason: why, as a sentence; empty where the state says it all.
        code: of what does not hold, a key of `notices.CODES`, for entries of ours.
        num_bytes: of its files.
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
        path: where it is, or would be.
        variable: environment variable that moves it.
        installed: version of the library, or None without it.
        items: what is in it.
        problem: why it was not looked into; empty if it was.
    """

    name: str
    path: Path
    variable: str
    installed: str | None
    items: tuple[Item, ...]
    problem: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of all items."""
        return sum(item.num_bytes for item in self.items)

    def useless(self) -> tuple[Item, ...]:
        """Items that nothing here reads again."""
        return tuple(item for item in self.items if item.state in USELESS)


def unfinished(path: Path, reason: str) -> Item:
    """What a writer has not finished: a leftover, unless it is young enough to be written still."""
    try:
        young = time.time() - path.lstat().st_mtime < _YOUNG_S
    except OSError:
        young = True  # renamed or removed at this moment
    return Item(path, BUSY, "a process may be writing it") if young else Item(path, LEFTOVER, reason)


def folders(path: Path) -> Iterator[Path]:
    """The folders in a folder, links to folders left out, in order; none if it is not there."""
    yield from (entry for entry in entries(path) if is_folder(entry))


def is_folder(path: Path) -> bool:
    """Whether it is a folder itself, and no link to one; of what cannot be looked at, no."""
    return os.path.isdir(path) and not os.path.islink(path)


def entries(path: Path) -> list[Path]:
    """What is in a folder, in order; nothing if it is not there or cannot be read."""
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def weighed(items: Iterable[Item]) -> tuple[Item, ...]:
    """The items with the bytes they take."""
    return tuple(Item(item.path, item.state, item.reason, item.code, size_of(item.path)) for item in items)


def size_of(path: Path) -> int:
    """Bytes of a file, or of the files below a folder. Links are not followed."""
    if not is_folder(path):
        with contextlib.suppress(OSError):  # removed meanwhile, or not ours to look at
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


def remove(cache: Cache, item: Item) -> str:
    """Remove an item; gives why it was left, or an empty text.

    It is left if it is, or lies behind, a symbolic link, so that nothing outside of the cache is ever touched.
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
        return f"{item.path} is, or lies behind, a symbolic link"
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
        return f"{path} nests too deep to be removed here; rm -r removes it"
    return ""
