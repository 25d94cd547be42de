"""Documents of evidence on disk, kept as all caches are: replaced whole, with a manifest, in the next best place.

The only module of this room that touches files. A document that cannot be read is a miss with its reason, and one that
cannot be written anywhere is kept for this process, so a folder that is read-only, full or somebody else's stops
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelhub.runtime.caches.fingerprint import Fingerprint
from kernelhub.runtime.caches.manifest import Flaw
from kernelhub.runtime.caches.store import Documents, forget_memory, holds_any

KIND = "evidence"

Document = dict[str, Any]


@dataclass(frozen=True)
class Miss:
    """A document that is there and says nothing here.

    Attributes:
        path: the file.
        reason: why it does not count, as a sentence.
    """

    path: Path
    reason: str


def documents(made_for: Fingerprint) -> Documents:
    """Where the documents that hold for something are."""
    return Documents(KIND, made_for)


def is_empty(architecture: str) -> bool:
    """Whether nothing at all is kept about devices of an architecture, which is told without looking into anything."""
    return not holds_any(KIND, architecture)


def read(made_for: Fingerprint, name: str) -> Document | None:
    """The document, or None where there is none that holds, which is said."""
    found = documents(made_for).read(name)
    return found if isinstance(found, dict) else None


def read_all(made_for: Fingerprint) -> Iterator[tuple[Path, Document | Miss]]:
    """Every document that is kept for something, by name, with its path."""
    shelf = documents(made_for)
    for name, document in shelf.every():
        path = shelf.path(name)
        if isinstance(document, Flaw):
            yield path, Miss(path, f"does not count: {document.sentence.removeprefix(f'{path} ')}")
        elif isinstance(document, dict):
            yield path, document
        else:
            yield path, Miss(path, f"holds a {type(document).__name__}, no object")


def write(made_for: Fingerprint, name: str, document: Document) -> str:
    """Put a document in its place, whole or not at all.

    Returns:
        Empty if it is on disk; else why it is not, and it holds for this process only.
    """
    shelf = documents(made_for)
    why_not = shelf.write(name, document)
    return why_not and f"{shelf.path(name)} cannot be written: {why_not}; set KERNELHUB_CACHE_DIR to a writable folder"


def forget_unwritten() -> None:
    """Drop what could not be written."""
    forget_memory(KIND)
