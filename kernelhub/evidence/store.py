"""Documents of evidence on disk: JSON files below ``evidence`` in the cache folder, replaced whole or not at all.

The only module of this room that touches files. A document that cannot be read is a miss with its reason, and one that
cannot be written is kept for this process, so a folder that is read-only, full or somebody else's stops nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelhub.runtime.caches.attempt import replace
from kernelhub.runtime.caches.root import places

Document = dict[str, Any]

# Documents that could not be written, by where they belong: they hold for the rest of this process.
_unwritten: dict[Path, Document] = {}


@dataclass(frozen=True)
class Miss:
    """A document that is there and says nothing here.

    Attributes:
        path: the file.
        reason: why it does not count, as a sentence.
    """

    path: Path
    reason: str


def folder(*parts: str) -> Path:
    """Where documents about something stand, e.g. ``folder("verify", "NVIDIA H200")``."""
    return places()[0].path.joinpath("evidence", *(_plain(part) for part in parts))


def read(path: Path) -> Document | Miss | None:
    """The document at a path, why it is none, or None if there is no file."""
    kept = _unwritten.get(path)
    if kept is not None:
        return kept
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        return Miss(path, f"cannot be read: {error.strerror or error}")
    except ValueError as error:  # also what is no UTF-8
        return Miss(path, f"is not JSON: {error}")
    return document if isinstance(document, dict) else Miss(path, f"holds a {type(document).__name__}, no object")


def read_all(below: Path) -> Iterator[tuple[Path, Document | Miss]]:
    """Every document in the folders right below one, by name; none if the folder is not there."""
    try:
        found = set(below.glob("*/*.json"))
    except OSError as error:
        yield below, Miss(below, f"cannot be listed: {error.strerror or error}")
        found = set()
    found |= {path for path in _unwritten if path.parent.parent == below}
    for path in sorted(found):
        document = read(path)
        if document is not None:
            yield path, document


def write(path: Path, document: Document) -> str:
    """Put a document in its place, whole or not at all.

    Returns:
        Empty if it is on disk; else why it is not, and it holds for this process only.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, json.dumps(document, indent=1))
    except OSError as error:
        _unwritten[path] = document
        return f"{path} cannot be written: {error.strerror or error}; set KERNELHUB_CACHE_DIR to a writable folder"
    _unwritten.pop(path, None)
    return ""


def holds_unwritten(below: Path) -> bool:
    """Whether this process keeps a document that belongs below a folder and could not be written."""
    return any(below in path.parents for path in _unwritten)


def forget_unwritten() -> None:
    """Drop what could not be written."""
    _unwritten.clear()


def _plain(part: str) -> str:
    """A name that every file system takes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", part)
