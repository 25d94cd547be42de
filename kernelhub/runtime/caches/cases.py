"""Calls stored on disk for replay: one file each, a line of JSON followed by the bytes of tensors.

The files are in the folder ``audit`` of the first writable place, for this user only (0600). Above a limit on number or
size, the oldest are removed. A file is read only if no other user could have written it, and only as numbers: nothing
in it is executed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kernelhub.runtime.caches.root import best, readable, usable
from kernelhub.runtime.caches.store import PlaceError, watching
from kernelhub.runtime.caches.trusted import create, tree

FOLDER, END = "audit", ".case"
MOST_CASES, MOST_BYTES = 16, 4 << 30
_MOST_HEADER = 1 << 20
_MAGIC = b"kernelhub case 1\n"
_NAME = re.compile(r"[A-Za-z0-9_.+-]{1,150}")


def write_case(name: str, header: dict[str, Any], parts: Iterable[bytes], num_bytes: int) -> tuple[Path | None, str]:
    """Store a case; returns its path, or None and the reason.

    Args:
        name: prefix of the file's name.
        header: JSON values.
        parts: the bytes that follow.
        num_bytes: size of all parts.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a valid name of a case; use letters, digits and _.+-")
    if num_bytes > MOST_BYTES:
        return None, f"it takes {num_bytes >> 20} MiB; the limit is {MOST_BYTES >> 20}"
    content = b"".join([_MAGIC, json.dumps(header).encode(), b"\n", *parts])
    reasons = []
    for place in usable():
        folder = place.path / FOLDER
        path = folder / f"{name}-{uuid.uuid4().hex[:8]}{END}"
        try:
            with watching(place):
                place.make()
                place.tree().make(folder)
                _make_room(folder, len(content))
                making = path.with_name(f".{path.name}.making-{uuid.uuid4().hex}")
                try:
                    create(making, content)
                    os.replace(making, path)
                finally:
                    with contextlib.suppress(FileNotFoundError):
                        making.unlink()
            return path, ""
        except PlaceError as failed:
            failed.say()
            reasons.append(f"{place.path}: {failed.reason}")
    return None, "; ".join(reasons) or best(executable=False).reason


def read_case(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and bytes of a case.

    Raises:
        OSError: it does not exist, or another user could have written it.
        ValueError: it is not a case.
    """
    path = path.absolute()
    place = next((place for place in readable() if path.is_relative_to(place.path)), None)
    content = (place.tree() if place is not None else tree(path.parent)).read(path, MOST_BYTES + _MOST_HEADER)
    if not content.startswith(_MAGIC):
        raise ValueError("it is not a case of an audit")
    end = content.find(b"\n", len(_MAGIC), len(_MAGIC) + _MOST_HEADER)
    if end < 0:
        raise ValueError("it ends before its operands")
    try:
        header = json.loads(content[len(_MAGIC) : end])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its first lines are not JSON: {error}") from None
    if not isinstance(header, dict):
        raise ValueError("its first lines are not a JSON object")
    return header, content[end + 1 :]


def kept_cases() -> list[Path]:
    """The files of all cases in readable places, newest first."""
    there = [case for place in readable() if (place.path / FOLDER).is_dir() for case in _cases(place.path / FOLDER)]
    return [path for *_, path in sorted(there, reverse=True)]


def _cases(folder: Path) -> list[tuple[int, int, Path]]:
    """Time, bytes and path of each case in a folder, oldest first."""
    there = []
    for entry in os.scandir(folder):
        info = entry.stat(follow_symlinks=False)
        if entry.name.endswith(END) and not entry.name.startswith(".") and stat.S_ISREG(info.st_mode):
            there.append((info.st_mtime_ns, info.st_size, Path(entry.path)))
    return sorted(there)


def _make_room(folder: Path, num_bytes: int) -> None:
    """Remove the oldest cases until one more is within the limits."""
    there = _cases(folder)
    while there and (len(there) >= MOST_CASES or sum(size for _, size, _ in there) + num_bytes > MOST_BYTES):
        with contextlib.suppress(FileNotFoundError):
            there[0][2].unlink()
        there.pop(0)
    free = os.statvfs(folder)
    if free.f_bavail * free.f_frsize < 2 * num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
