"""Documents of evidence on disk, stored as in all caches: replaced atomically, with a manifest.

Only this module of the package accesses files. A document that cannot be read is a miss with its reason. A document
that cannot be written is kept for this process, so a read-only, full or foreign folder stops nothing.
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
    """A document that exists and is not valid here.

    Attributes:
        path: the file.
        reason: why it is ignored, as a sentence.
    """

    path: Path
    reason: str


def documents(made_for: Fingerprint) -> Documents:
    """The documents of a fingerprint."""
    return Documents(KIND, made_for)


def is_empty(architecture: str) -> bool:
    """Whether there is no document about devices of an architecture, without reading any file."""
    return not holds_any(KIND, architecture)


def read(made_for: Fingerprint, name: str) -> Document | None:
    """The document, or None without a valid one, with a notice for an invalid one."""
    found = documents(made_for).read(name)
    return found if isinstance(found, dict) else None


def read_all(made_for: Fingerprint) -> Iterator[tuple[Path, Document | Miss]]:
    """All documents of a fingerprint, by name, with their paths."""
    shelf = documents(made_for)
    for name, document in shelf.every():
        path = shelf.path(name)
        if isinstance(document, Flaw):
            yield path, Miss(path, f"is not valid here: {document.sentence.removeprefix(f'{path} ')}")
        elif isinstance(document, dict):
            yield path, document
        else:
            yield path, Miss(path, f"contains a {type(document).__name__}, not an object")


def write(made_for: Fingerprint, name: str, document: Document) -> str:
    """Store a document atomically.

    Returns:
        Empty if it is on disk; else why it is not, and it is valid in this process only.
    """
    shelf = documents(made_for)
    why_not = shelf.write(name, document)
    return why_not and f"{shelf.path(name)} cannot be written: {why_not}; set KERNELHUB_CACHE_DIR to a writable folder"


def forget_unwritten() -> None:
    """Drop documents that could not be written."""
    forget_memory(KIND)
