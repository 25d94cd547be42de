"""Cache entries that are made once, and documents that are rewritten, both identified by a fingerprint.

>>> import tempfile; from pathlib import Path
>>> from kernelhub.runtime.caches.fingerprint import fingerprint
>>> from kernelhub.runtime.caches.store import Store
>>> store = Store("example", fingerprint("any", cuda="13.0"), folder=Path(tempfile.mkdtemp()))
>>> store.write("timings", {"triton.split_kv": 21.5})  # empty: it is on disk
''
>>> store.read("timings")
{'triton.split_kv': 21.5}
>>> entry = store.get("kernel", lambda folder: (folder / "kernel.cubin").write_bytes(b"..."))
>>> entry.file("kernel.cubin").read_bytes()
b'...'

The path below each place is ``<kind>/<sm>/<fingerprint>/<name>``: a folder with its manifest (`get`), beside the JSON
documents (`write`). Both appear complete, by one rename. A document is ``<name>.json`` with a revision; if several
places have one, the latest counts. A place that fails in use is skipped with a notice. A process without a writable
place keeps its documents in memory.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelhub.errors import CacheError, LockTimeout
from kernelhub.runtime.caches import manifest
from kernelhub.runtime.caches.fingerprint import Fingerprint
from kernelhub.runtime.caches.lock import TOKEN, Held, OnWait, lock
from kernelhub.runtime.caches.manifest import Flaw, synchronise
from kernelhub.runtime.caches.notices import CODES, announce, say
from kernelhub.runtime.caches.root import PLACE_ERRORS, VARIABLE, Place, best, code_of, fails, places, readable, usable
from kernelhub.runtime.caches.trusted import FILE_MODE, Tree, Untrusted, create

# Errors of `make` that the place causes; `make` itself causes all others.
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ESTALE, errno.EIO)


class PlaceError(Exception):
    """A place failed in use.

    Attributes:
        place: the place.
        code: a key of `notices.CODES`.
        reason: the error of the operating system.
    """

    def __init__(self, place: Place, code: str, reason: str) -> None:
        super().__init__(reason)
        self.place, self.code, self.reason = place, code, reason

    def say(self) -> None:
        """Report it, once for each place, and read the next places from now on."""
        fails(self.place)
        say(self.code, self.place.path, f"{self.place.path} cannot be used: {self.reason}")


@contextlib.contextmanager
def watching(place: Place, errors: Collection[int] = tuple(PLACE_ERRORS)) -> Iterator[None]:
    """Turn errors of the operating system that concern the place into a `PlaceError`."""
    try:
        yield
    except OSError as error:
        code = code_of(error) if error.errno in errors else None
        if isinstance(error, Untrusted):
            code = error.code
        if code is None:
            raise
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
        raise PlaceError(place, code, reason) from error


@contextlib.contextmanager
def alone(place: Place, folder: Path, name: str, patience_s: float, on_wait: OnWait | None) -> Iterator[Held | None]:
    """Hold the lock of one entry; without a lock, with a notice, if its holder does not release it in time."""
    with contextlib.ExitStack() as stack:
        held = None
        with watching(place):
            place.tree().make(folder)
            try:
                held = stack.enter_context(lock(folder / f"{name}.lock", timeout_s=patience_s, on_wait=on_wait))
            except LockTimeout as error:
                say("lock_timeout", error.path, f"{error}; {name} is made without the lock")
        yield held


def replace(path: Path, text: str, mode: int = FILE_MODE) -> None:
    """Replace a file by a text atomically; it is on disk before this returns."""
    making = path.with_name(f".{path.name}.making-{uuid.uuid4().hex}")
    try:
        create(making, text.encode())
        making.chmod(mode)
        synchronise(making)
        try:
            os.replace(making, path)
        except IsADirectoryError:  # which kernelhub did not create
            aside = path.with_name(f".{path.name}.bad-{uuid.uuid4().hex}")
            os.rename(path, aside)
            os.replace(making, path)
            shutil.rmtree(aside, ignore_errors=True)
        synchronise(path.parent)
    finally:
        with contextlib.suppress(FileNotFoundError):
            making.unlink()


_PATIENCE_S = 30.0
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,120}")
_END = ".json"
_MOST_REVISIONS = 1 << 53

_memory: dict[tuple[str, str, str], tuple[int, Any]] = {}  # documents of a process without a writable place
_memory_guard = threading.Lock()


def _renew() -> None:
    global _memory_guard
    _memory_guard = threading.Lock()  # another thread may have held it when the process forked


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


@dataclass(frozen=True)
class Documents:
    """One kind of documents, for one fingerprint.

    Attributes:
        kind: the kind of documents, the name of a folder: ``"cpp"``, ``"nvrtc"``, ``"evidence"``.
        fingerprint: the fingerprint of the documents.
        folder: the only place to use, instead of those of `root.places`.
        executable: whether files are loaded as code, which a mount may forbid.
    """

    kind: str
    fingerprint: Fingerprint
    folder: Path | None = None
    executable: bool = False

    def read(self, name: str) -> Any:
        """The document, or None: the latest valid one, if several places have one."""
        revision, document, flaws = self._latest(name)
        for path, flaw in flaws:
            say(flaw.code, path, flaw.sentence)
        return document if revision else None

    def every(self) -> Iterator[tuple[str, Any]]:
        """All documents by name; a `Flaw` for one without a valid copy, without a notice."""
        for name in sorted(self._names()):
            revision, document, flaws = self._latest(name)
            if revision or flaws:
                yield name, document if revision else flaws[0][1]

    def write(self, name: str, document: Any) -> str:
        """Store a document, replacing an earlier one; in memory if no place is writable.

        Args:
            document: JSON values; numbers must be finite.

        Returns:
            Empty if it is on disk, else why it is not.
        """
        return self._write(name, document, self._latest(name)[0] + 1)

    def update(self, name: str, change: Callable[[Any], Any], *, patience_s: float = _PATIENCE_S) -> Any:
        """Read, change and write a document under its lock; returns what was written.

        Args:
            change: takes the document, or None, and returns the new one.
            patience_s: how long to wait for another process that changes it. After that it is changed without the lock.
        """
        place = next(self._usable(), None)
        if place is not None:
            try:
                with alone(place, self._folder(place), checked(name), patience_s, None):
                    return self._changed(name, change)
            except PlaceError as failed:
                failed.say()
        return self._changed(name, change)

    def path(self, name: str) -> Path:
        """Path of the document, in the first place that has it, else in the place that would be written."""
        there = self._readable() or list(places())
        paths = [self._folder(place) / f"{checked(name)}{_END}" for place in there]
        return next((path for path in paths if os.path.lexists(path)), paths[0])

    def _changed(self, name: str, change: Callable[[Any], Any]) -> Any:
        revision, document, flaws = self._latest(name)
        for path, flaw in flaws:
            say(flaw.code, path, flaw.sentence)
        document = change(document)
        self._write(name, document, revision + 1)
        return document

    def _names(self) -> set[str]:
        names = set()
        for place in self._readable():
            try:
                found = os.listdir(self._folder(place))
            except OSError:  # does not exist, or cannot be listed
                continue
            names |= {name.removesuffix(_END) for name in found if name.endswith(_END)}
        with _memory_guard:
            names |= {name for *here, name in _memory if tuple(here) == self._key("")[:2]}
        return {name for name in names if _NAME.fullmatch(name)}

    def _latest(self, name: str) -> tuple[int, Any, list[tuple[Path, Flaw]]]:
        """Revision and document, (0, None) without one; and the flaws, with their paths."""
        with _memory_guard:
            revision, document = copy.deepcopy(_memory.get(self._key(name), (0, None)))
        flaws = []
        for place in self._readable():
            path = self._folder(place) / f"{checked(name)}{_END}"
            if not os.path.lexists(path):
                continue
            content = manifest.read(path, place.tree(), self.fingerprint)
            if isinstance(content, Flaw):
                flaws.append((path, content))
            elif "document" not in content or not 0 < content.get("revision", 0) < _MOST_REVISIONS:
                flaws.append((path, Flaw("manifest_unreadable", f"{path} is a manifest, not a document")))
            elif content["revision"] > revision:
                revision, document = content["revision"], content["document"]
        return revision, document, flaws

    def _write(self, name: str, document: Any, revision: int) -> str:
        content = manifest.describe(self.kind, name, self.fingerprint) | {"revision": revision, "document": document}
        text = manifest.sealed(content)
        reasons = []
        for place in self._usable():
            try:
                with watching(place):
                    place.tree().make(self._folder(place))
                    replace(self._folder(place) / f"{checked(name)}{_END}", text)
                with _memory_guard:
                    _memory.pop(self._key(name), None)
                return ""
            except PlaceError as failed:
                failed.say()
                reasons.append(f"{place.path}: {failed.reason}")
        say("cache_memory", self.kind, f"{self.kind}/{name} is kept in memory, and is lost when the process ends")
        with _memory_guard:
            _memory[self._key(name)] = revision, copy.deepcopy(document)
        return "; ".join(reasons) or best(executable=self.executable).reason

    def _usable(self) -> Iterator[Place]:
        """Places to write to, marked as caches."""
        if self.folder is not None:
            yield Place(self.folder, VARIABLE)
            return
        for place in usable(executable=self.executable):
            try:
                with watching(place):
                    place.make()
            except PlaceError as failed:
                failed.say()
                continue
            yield place

    def _readable(self) -> list[Place]:
        return readable(executable=self.executable) if self.folder is None else [Place(self.folder, VARIABLE)]

    def _folder(self, place: Place) -> Path:
        return place.path / checked(self.kind) / checked(self.fingerprint.sm) / self.fingerprint.digest

    def _key(self, name: str) -> tuple[str, str, str]:
        return self.kind, f"{self.fingerprint.sm}/{self.fingerprint.digest}", name


def holds_any(kind: str, sm: str) -> bool:
    """Whether any place or the memory contains entries of a kind for an architecture; does not read them."""
    with _memory_guard:
        if any(key[0] == kind and key[1].startswith(f"{checked(sm)}/") for key in _memory):
            return True
    return any(os.path.isdir(place.path / checked(kind) / checked(sm)) for place in readable())


def forget_memory(kind: str) -> None:
    """Drop the documents of a kind that are in memory only."""
    with _memory_guard:
        for key in [key for key in _memory if key[0] == kind]:
            del _memory[key]


def checked(name: str) -> str:
    """Check the name of a kind, an architecture or a document.

    Raises:
        ValueError: it is not a valid name.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a valid name of an entry; use letters, digits and _.+-, no leading dot")
    return name


# Longest wait for one compilation: FlashInfer's longest takes 11 minutes on two cores.
PATIENCE_S = 1200.0


@dataclass(frozen=True)
class Entry:
    """The verified files of an entry.

    Attributes:
        path: folder of the files.
        manifest: the manifest of the files.
        tree: the cache that contains them.
    """

    path: Path
    manifest: dict[str, Any]
    tree: Tree

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[int]:
        """Descriptor of one of its files, verified again through that descriptor.

        Raises:
            KeyError: the manifest does not list the file.
            CacheError: the file was changed.
        """
        self.file(name)
        with manifest.opened(self.path, name, self.manifest, self.tree) as file:
            if isinstance(file, Flaw):
                raise CacheError(f"{file.code}: {file.sentence}; {CODES[file.code][1]}")
            yield file

    def file(self, name: str) -> Path:
        """Path of one of its files.

        Raises:
            KeyError: the manifest does not list the file.
        """
        if name not in self.manifest["files"]:
            raise KeyError(f"{self.path} holds {', '.join(self.manifest['files'])}, not {name}")
        return self.path / name


@dataclass(frozen=True)
class Store(Documents):
    """Documents and entries of one kind, for one fingerprint. Attributes as of `Documents`."""

    def find(self, name: str) -> Entry | None:
        """The entry, with verified files; None without a valid one, with a notice for an invalid one."""
        found = (self._found_in(place, name) for place in self._readable())
        return next((entry for entry in found if entry is not None), None)

    def get(
        self,
        name: str,
        make: Callable[[Path], object],
        *,
        patience_s: float = PATIENCE_S,
        on_wait: OnWait | None = None,
    ) -> Entry:
        """The entry, made now if it does not exist. One process makes it, among all machines that share the place.

        Args:
            name: name of the entry.
            make: fills the given empty folder; its errors reach the caller.
            patience_s: how long to wait for another process that makes it. After that it is made without the lock.
            on_wait: called while waiting, with the holder as text and the seconds waited.

        Raises:
            CacheError: no place is writable.
        """
        found = self.find(name)
        if found is not None:
            return found
        announce(self.kind, name)
        reasons = []
        for place in self._usable():
            try:
                return self._made_in(place, name, make, patience_s, on_wait)
            except PlaceError as failed:
                failed.say()
                reasons.append(f"{place.path}: {failed.reason}")
        reason = "; ".join(reasons) or best(executable=self.executable).reason
        notice = say("cache_unavailable", self.kind, f"{self.kind}/{name} cannot be stored anywhere: {reason}")
        raise CacheError(f"{notice.sentence}; {notice.remedy}")

    def _found_in(self, place: Place, name: str) -> Entry | None:
        path = self._folder(place) / checked(name)
        if not os.path.lexists(path):
            return None
        content = manifest.verify(path, place.tree(), self.fingerprint)
        if not isinstance(content, Flaw):
            return Entry(path, content, place.tree())
        say(content.code, path, content.sentence)
        return None

    def _made_in(
        self, place: Place, name: str, make: Callable[[Path], object], patience_s: float, on_wait: OnWait | None
    ) -> Entry:
        folder = self._folder(place)
        with alone(place, folder, checked(name), patience_s, on_wait) as held:
            if held is not None and held.after is not None:
                shutil.rmtree(_making(folder, name, held.after), ignore_errors=True)
            found = self._found_in(place, name)  # the process that was waited for may have made it
            if found is not None:
                return found
            token = held.token if held is not None else uuid.uuid4().hex
            making = _making(folder, name, token)
            try:
                with watching(place):
                    place.tree().make(making)
                with watching(place, OF_THE_DISK):
                    make(making)
                with watching(place):
                    manifest.write(making, self.kind, name, self.fingerprint)
                    return self._published(making, folder / name, place.tree())
            finally:
                shutil.rmtree(making, ignore_errors=True)

    def _published(self, making: Path, path: Path, tree: Tree) -> Entry:
        """Publish by one rename. An existing entry is used if it is valid, and moved away if not."""
        for _ in range(8):
            content = manifest.verify(path, tree, self.fingerprint) if os.path.lexists(path) else None
            if content is not None and not isinstance(content, Flaw):
                return Entry(path, content, tree)
            try:
                if content is not None:
                    bad = making.with_name(making.name.replace(".making-", ".bad-"))
                    os.rename(path, bad)
                    shutil.rmtree(bad, ignore_errors=True) if _is_folder(bad) else bad.unlink()
                os.rename(making, path)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT) or not making.is_dir():
                    raise
                continue  # another process published or moved it between two of these lines
            manifest.synchronise(path.parent)
            written = manifest.verify(path, tree, self.fingerprint)
            if not isinstance(written, Flaw):
                return Entry(path, written, tree)
            say(written.code, path, written.sentence)
            raise OSError(errno.EIO, "does not contain what was just written", str(path))
        raise OSError(errno.EIO, "is replaced again and again", str(path))


def _making(folder: Path, name: str, token: str) -> Path:
    """Folder in which an entry is made; named by the holder's token, so that the next holder of its lock removes it."""
    if not TOKEN.fullmatch(token):
        raise ValueError(f"{token!r} is not a token of a lock")
    return folder / f".{name}.making-{token}"


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
