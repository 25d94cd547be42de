"""Validation of cache entries.

An entry is a folder with files and a ``manifest.json``, which lists each file's size and SHA-256, every part of the
fingerprint, the user and machine that made it, and a digest of itself. A document is one JSON file of the same form
that contains the document. An invalid entry is a `Flaw` and is never loaded.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelhub.probes import document
from kernelhub.probes.document import DocumentError
from kernelhub.runtime.caches.fingerprint import Fingerprint, descriptor_digest, digest_of, file_digest
from kernelhub.runtime.caches.trusted import Tree, Untrusted, close_to_others, create

NAME = "manifest.json"
FORMAT = 1
_PARTS = {"parts": {str: str}, "sha256": str, "made?": {str: (str, int, float)}, "revision?": int}
_FILES = {str: {"bytes": int, "sha256": str}}


@dataclass(frozen=True)
class Flaw:
    """Why an entry is a miss: a key of `notices.CODES` and a sentence."""

    code: str
    sentence: str


def describe(kind: str, name: str, fingerprint: Fingerprint) -> dict[str, Any]:
    """The first fields of manifests and documents: fingerprint, maker, time."""
    return {
        "format": FORMAT,
        "kind": kind,
        "name": name,
        "sm": fingerprint.sm,
        "fingerprint": fingerprint.digest,
        "parts": dict(fingerprint.parts),
        "made": {
            "kernelhub": version(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "user": _user(),
            "unix_time": round(time.time(), 3),
        },
    }


def version() -> str:
    """Version of the running kernelhub."""
    return str(getattr(sys.modules["kernelhub"], "__version__", "unknown"))


def sealed(content: Mapping[str, Any]) -> str:
    """The text of a manifest or document, with the digest of its other fields.

    Raises:
        ValueError: a number in it is not finite.
        TypeError: a value in it is not valid in JSON.
    """
    return json.dumps({**content, "sha256": _own_digest(content)}, indent=1, sort_keys=True, allow_nan=False)


def write(folder: Path, kind: str, name: str, fingerprint: Fingerprint) -> None:
    """Write the manifest of a folder; all files are on disk before this returns."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    listed = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": file_digest(path)}
        for path in files
    }
    create(folder / NAME, sealed({**describe(kind, name, fingerprint), "files": listed}).encode())
    close_to_others(folder)
    for path in (*files, folder / NAME, folder):
        synchronise(path)


def verify(folder: Path, tree: Tree, fingerprint: Fingerprint | None = None) -> dict[str, Any] | Flaw:
    """The manifest of a valid entry, or its flaw.

    Args:
        folder: the entry.
        tree: the cache that contains it, which defines trusted owners.
        fingerprint: the required fingerprint; by default the one that the entry states.
    """
    if folder.is_symlink():
        return Flaw("entry_symlink", f"{folder} is a symbolic link")
    try:
        content = read(folder / NAME, tree, fingerprint)
        if isinstance(content, Flaw):
            return content
        wrong = document.difference(content.get("files"), _FILES, "its list of files")
        if wrong:
            return Flaw("manifest_unreadable", f"{folder / NAME} has an invalid list of files: {wrong}")
        for name in content["files"]:
            with opened(folder, name, content, tree) as file:
                if isinstance(file, Flaw):
                    return file
    except OSError as error:
        return _unreadable(folder, error)
    return content


@contextlib.contextmanager
def opened(folder: Path, name: str, content: Mapping[str, Any], tree: Tree) -> Iterator[int | Flaw]:
    """Descriptor of a file that a manifest lists, its contents verified through that descriptor, or its flaw.

    Raises:
        OSError: it exists and cannot be read.
    """
    listed, path = content["files"][name], folder / name
    if "\0" in name or os.path.isabs(name) or ".." in Path(name).parts:
        yield Flaw("manifest_foreign", f"{folder / NAME} lists {name!r}, which is outside of the entry")
        return
    if path.is_symlink() or (os.path.lexists(path) and not path.is_file()):
        yield Flaw("entry_symlink", f"{path} is not a regular file")
        return
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(tree.opened(path))
        except FileNotFoundError:
            yield Flaw("file_missing", f"there is no {path}")
            return
        size = os.fstat(file).st_size
        if size != listed["bytes"]:
            yield Flaw("file_truncated", f"{path} has {size} bytes, {listed['bytes']} were written")
        elif descriptor_digest(file) != listed["sha256"]:
            yield Flaw("file_edited", f"{path} has other contents than were written")
        else:
            yield file


def read(path: Path, tree: Tree, fingerprint: Fingerprint | None = None) -> dict[str, Any] | Flaw:
    """The contents of a valid manifest or document, or its flaw."""
    try:
        if path.is_symlink():
            return Flaw("entry_symlink", f"{path} is a symbolic link")
        raw = tree.read(path, document.MOST_BYTES + 1)
    except FileNotFoundError:
        return Flaw("manifest_missing", f"there is no {path}")
    except OSError as error:
        return _unreadable(path, error)
    try:
        content = document.parsed(raw)
    except DocumentError as error:
        return Flaw("manifest_unreadable", f"{path} ({len(raw)} bytes) {error}")
    wrong = document.difference(content, _PARTS)
    if wrong:
        return Flaw("manifest_unreadable", f"{path} is JSON, but not a manifest: {wrong}")
    if content["sha256"] != _own_digest({key: value for key, value in content.items() if key != "sha256"}):
        return Flaw("manifest_edited", f"{path} was changed after it was written")
    return _foreign(path, content, fingerprint) or content


def synchronise(path: Path) -> None:
    """Flush a file or folder to disk, so that after a crash, or on another machine, it is complete or absent."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _foreign(path: Path, content: dict[str, Any], fingerprint: Fingerprint | None) -> Flaw | None:
    if content.get("format") != FORMAT:
        return Flaw("manifest_foreign", f"{path} has format {content.get('format')}, this version reads {FORMAT}")
    if fingerprint is None:
        stated = Fingerprint(str(content.get("sm")), tuple(sorted(content["parts"].items())))
        folder = path.parent.parent if path.name == NAME else path.parent
        if stated.digest == content.get("fingerprint") == folder.name and stated.sm == folder.parent.name:
            return None
        return Flaw("manifest_foreign", f"{path} was made for {stated.sm}/{content.get('fingerprint')} and copied here")
    differs = fingerprint.difference(content["parts"])
    if content.get("sm") != fingerprint.sm:
        differs = f"sm {content.get('sm')}, not {fingerprint.sm}"
    return Flaw("manifest_foreign", f"{path} was made for {differs}") if differs else None


def _unreadable(path: Path, error: OSError) -> Flaw:
    code = "entry_untrusted" if isinstance(error, Untrusted) else "entry_unreadable"
    return Flaw(code, f"{error.filename or path} {error.strerror or error}")


def _own_digest(content: Mapping[str, Any]) -> str:
    return digest_of(json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a user without an account, as in containers
        return str(os.getuid())
