"""Files that are made once, and documents that are rewritten, found again by what they were made for.

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

Below each place there is ``<kind>/<sm>/<fingerprint>/<name>``: a folder with its manifest (`get`), beside the JSON
documents (`write`, in `documents`). Both appear whole, by one rename. A place that fails in use is passed over for the
next, and said.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelhub.errors import CacheError
from kernelhub.runtime.caches import manifest
from kernelhub.runtime.caches.attempt import OF_THE_DISK, PlaceError, alone, watching
from kernelhub.runtime.caches.documents import Documents, checked
from kernelhub.runtime.caches.holder import TOKEN
from kernelhub.runtime.caches.lock import OnWait
from kernelhub.runtime.caches.manifest import Flaw
from kernelhub.runtime.caches.monitor import announce
from kernelhub.runtime.caches.notices import CODES, say
from kernelhub.runtime.caches.root import Place, best
from kernelhub.runtime.caches.trusted import Tree

# How long one compilation is waited for: FlashInfer's longest takes 11 minutes on two cores.
PATIENCE_S = 1200.0


@dataclass(frozen=True)
class Entry:
    """Files that were made and verified.

    Attributes:
        path: folder of the files.
        manifest: what is known of them.
        tree: the cache that they lie in.
    """

    path: Path
    manifest: dict[str, Any]
    tree: Tree

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[int]:
        """Descriptor of one of its files, verified by that descriptor once more.

        Raises:
            KeyError: the manifest lists no such file.
            CacheError: it is not what was made.
        """
        self.file(name)
        with manifest.opened(self.path, name, self.manifest, self.tree) as file:
            if isinstance(file, Flaw):
                raise CacheError(f"{file.code}: {file.sentence}; {CODES[file.code][1]}")
            yield file

    def file(self, name: str) -> Path:
        """One of its files.

        Raises:
            KeyError: the manifest lists no such file.
        """
        if name not in self.manifest["files"]:
            raise KeyError(f"{self.path} holds {', '.join(self.manifest['files'])}, not {name}")
        return self.path / name


@dataclass(frozen=True)
class Store(Documents):
    """One kind of things, made for one fingerprint: documents, and entries of files. Attributes as of `Documents`."""

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
            found = self._found_in(place, name)  # whoever was waited for may have made it
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
        """By one rename. What lies there already is taken if it holds, and put away if not."""
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
                continue  # another process published, or put away, between two of these lines
            manifest.synchronise(path.parent)
            written = manifest.verify(path, tree, self.fingerprint)
            if not isinstance(written, Flaw):
                return Entry(path, written, tree)
            say(written.code, path, written.sentence)
            raise OSError(errno.EIO, "does not hold what was just written", str(path))
        raise OSError(errno.EIO, "is replaced again and again", str(path))


def _making(folder: Path, name: str, token: str) -> Path:
    """Where an entry is made; named by the holder's token, so that who takes its lock over clears it away."""
    if not TOKEN.fullmatch(token):
        raise ValueError(f"{token!r} is no token of a lock")
    return folder / f".{name}.making-{token}"


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
