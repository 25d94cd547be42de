"""Files that are made once and documents that are rewritten, found again by what they were made for.

>>> import tempfile; from pathlib import Path
>>> from kernelhub.runtime.caches.fingerprint import fingerprint
>>> from kernelhub.runtime.caches.store import Store
>>> store = Store("example", fingerprint("any", cuda="13.0"), folder=Path(tempfile.mkdtemp()))
>>> store.write("timings", {"triton.split_kv": 21.5})
>>> store.read("timings")
{'triton.split_kv': 21.5}
>>> entry = store.get("kernel", lambda folder: (folder / "kernel.cubin").write_bytes(b"..."))
>>> entry.file("kernel.cubin").read_bytes()
b'...'

Below each place there is ``<kind>/<sm>/<fingerprint>/<name>``: a folder with its manifest (`get`), or a JSON document
(`write`). Both appear whole, by one rename. A place that fails in use is passed over for the next, and said.
"""

from __future__ import annotations

import copy
import errno
import os
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelhub.errors import CacheError
from kernelhub.runtime.caches import manifest
from kernelhub.runtime.caches.attempt import OF_THE_DISK, PlaceError, alone, replace, watching
from kernelhub.runtime.caches.fingerprint import Fingerprint
from kernelhub.runtime.caches.lock import OnWait
from kernelhub.runtime.caches.manifest import Flaw
from kernelhub.runtime.caches.monitor import announce
from kernelhub.runtime.caches.notices import say
from kernelhub.runtime.caches.root import VARIABLE, Place, best, readable, usable

# How long one compilation is waited for: FlashInfer's longest takes 11 minutes on two cores.
PATIENCE_S = 1200.0
_DOCUMENT_PATIENCE_S = 30.0
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,120}")

_memory: dict[tuple[str, str, str], tuple[int, Any]] = {}  # documents of a process that can write nowhere
_memory_guard = threading.Lock()


@dataclass(frozen=True)
class Entry:
    """Files that were made and verified.

    Attributes:
        path: folder of the files.
        manifest: what is known of them.
    """

    path: Path
    manifest: dict[str, Any]

    def file(self, name: str) -> Path:
        """One of its files.

        Raises:
            KeyError: the manifest lists no such file.
        """
        if name not in self.manifest["files"]:
            raise KeyError(f"{self.path} holds {', '.join(self.manifest['files'])}, not {name}")
        return self.path / name


@dataclass(frozen=True)
class Store:
    """One kind of things, made for one fingerprint.

    Attributes:
        kind: what is kept, the name of a folder: ``"cpp"``, ``"nvrtc"``, ``"evidence"``.
        fingerprint: for what it is made.
        folder: the only place to use, instead of those that `root.places` names.
        executable: whether files are loaded as code, which a mount may forbid.
    """

    kind: str
    fingerprint: Fingerprint
    folder: Path | None = None
    executable: bool = False

    def find(self, name: str) -> Entry | None:
        """The entry, its files verified; None if there is none, or none that holds, which is said."""
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
        """The entry, made now if there is none. One process makes it, on all machines that share the place.

        Args:
            name: of the entry.
            make: fills the empty folder that it is given; what it raises reaches the caller.
            patience_s: how long another process that makes it is waited for. Then it is made without the lock.
            on_wait: called while waiting, with the holder as words and the seconds waited.

        Raises:
            CacheError: no place can be written.
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
        notice = say("cache_unavailable", self.kind, f"{self.kind}/{name} cannot be kept anywhere: {reason}")
        raise CacheError(f"{notice.sentence}; {notice.remedy}")

    def read(self, name: str) -> Any:
        """The document, or None: the latest of those that hold, should several places have one."""
        return self._latest(name)[1]

    def write(self, name: str, document: Any) -> None:
        """Keep a document, in place of an earlier one; in memory where no place can be written.

        Args:
            document: what JSON holds; numbers must be finite.
        """
        self._write(name, document, self._latest(name)[0] + 1)

    def update(self, name: str, change: Callable[[Any], Any], *, patience_s: float = _DOCUMENT_PATIENCE_S) -> Any:
        """Read, change and write a document, alone among all processes; gives what was written.

        Args:
            change: takes the document, or None, and gives the new one.
            patience_s: how long another process that changes it is waited for. Then it is changed without the lock.
        """
        place = next(self._usable(), None)
        if place is not None:
            try:
                with alone(place, self._folder(place), _checked(name), patience_s, None):
                    return self._changed(name, change)
            except PlaceError as failed:
                failed.say()
        return self._changed(name, change)

    def _changed(self, name: str, change: Callable[[Any], Any]) -> Any:
        revision, document = self._latest(name)
        document = change(document)
        self._write(name, document, revision + 1)
        return document

    def _found_in(self, place: Place, name: str) -> Entry | None:
        path = self._folder(place) / _checked(name)
        if not os.path.lexists(path):
            return None
        content = manifest.verify(path, self.fingerprint)
        if not isinstance(content, Flaw):
            return Entry(path, content)
        say(content.code, path, content.sentence)
        return None

    def _made_in(
        self, place: Place, name: str, make: Callable[[Path], object], patience_s: float, on_wait: OnWait | None
    ) -> Entry:
        folder = self._folder(place)
        with alone(place, folder, _checked(name), patience_s, on_wait) as held:
            if held is not None and held.after is not None:
                shutil.rmtree(_making(folder, name, held.after), ignore_errors=True)
            found = self._found_in(place, name)  # whoever was waited for may have made it
            if found is not None:
                return found
            token = held.token if held is not None else uuid.uuid4().hex
            making = _making(folder, name, token)
            try:
                with watching(place):
                    making.mkdir()
                with watching(place, OF_THE_DISK):
                    make(making)
                with watching(place):
                    manifest.write(making, self.kind, name, self.fingerprint)
                    return self._published(making, folder / name)
            finally:
                shutil.rmtree(making, ignore_errors=True)

    def _published(self, making: Path, path: Path) -> Entry:
        """By one rename. What lies there already is taken if it holds, and put away if not."""
        for _ in range(8):
            content = manifest.verify(path, self.fingerprint) if os.path.lexists(path) else None
            if content is not None and not isinstance(content, Flaw):
                return Entry(path, content)
            try:
                if content is not None:
                    bad = making.with_name(making.name.replace(".making-", ".bad-"))
                    os.rename(path, bad)
                    bad.unlink() if bad.is_symlink() or bad.is_file() else shutil.rmtree(bad, ignore_errors=True)
                os.rename(making, path)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT) or not making.is_dir():
                    raise
                continue  # another process published, or put away, between two of these lines
            manifest.synchronise(path.parent)
            written = manifest.verify(path, self.fingerprint)
            if not isinstance(written, Flaw):
                return Entry(path, written)
            say(written.code, path, written.sentence)
            raise OSError(errno.EIO, "does not hold what was just written", str(path))
        raise OSError(errno.EIO, "is replaced again and again", str(path))

    def _latest(self, name: str) -> tuple[int, Any]:
        """Revision and document; (0, None) without one."""
        with _memory_guard:
            latest = copy.deepcopy(_memory.get(self._key(name), (0, None)))
        for place in self._readable():
            path = self._folder(place) / f"{_checked(name)}.json"
            if not os.path.lexists(path):
                continue
            try:
                content = manifest.read(path, self.fingerprint)
            except OSError as error:
                content = Flaw("entry_unreadable", f"{path}: {error.strerror or error}")
            if isinstance(content, Flaw):
                say(content.code, path, content.sentence)
            elif content.get("revision", 0) > latest[0]:
                latest = content["revision"], content["document"]
        return latest

    def _write(self, name: str, document: Any, revision: int) -> None:
        content = manifest.describe(self.kind, name, self.fingerprint) | {"revision": revision, "document": document}
        text = manifest.sealed(content)
        for place in self._usable():
            try:
                with watching(place):
                    self._folder(place).mkdir(parents=True, exist_ok=True)
                    replace(self._folder(place) / f"{_checked(name)}.json", text)
                with _memory_guard:
                    _memory.pop(self._key(name), None)
                return
            except PlaceError as failed:
                failed.say()
        say("cache_memory", self.kind, f"{self.kind}/{name} is kept in memory, and is gone when the process ends")
        with _memory_guard:
            _memory[self._key(name)] = revision, copy.deepcopy(document)

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
        return place.path / _checked(self.kind) / _checked(self.fingerprint.sm) / self.fingerprint.digest

    def _key(self, name: str) -> tuple[str, str, str]:
        return self.kind, f"{self.fingerprint.sm}/{self.fingerprint.digest}", name


def _making(folder: Path, name: str, token: str) -> Path:
    """Where an entry is made; named by the holder's token, so that who takes its lock over clears it away."""
    return folder / f".{name}.making-{token}"


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot name an entry; take letters, digits and _.+-, not a dot first")
    return name
