"""JSON documents that are rewritten, found again by what they were made for.

Below each place a document is ``<kind>/<sm>/<fingerprint>/<name>.json``, and appears whole, by one rename. It bears a
revision: of several, in places that came and went, the latest counts. A process that can write nowhere keeps its own
in memory.
"""

from __future__ import annotations

import copy
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelhub.runtime.caches import manifest
from kernelhub.runtime.caches.attempt import PlaceError, alone, replace, watching
from kernelhub.runtime.caches.fingerprint import Fingerprint
from kernelhub.runtime.caches.manifest import Flaw
from kernelhub.runtime.caches.notices import say
from kernelhub.runtime.caches.root import VARIABLE, Place, best, places, readable, usable

_PATIENCE_S = 30.0
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,120}")
_END = ".json"
_MOST_REVISIONS = 1 << 53

_memory: dict[tuple[str, str, str], tuple[int, Any]] = {}  # documents of a process that can write nowhere
_memory_guard = threading.Lock()


@dataclass(frozen=True)
class Documents:
    """One kind of documents, made for one fingerprint.

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

    def read(self, name: str) -> Any:
        """The document, or None: the latest of those that hold, should several places have one."""
        revision, document, flaws = self._latest(name)
        for path, flaw in flaws:
            say(flaw.code, path, flaw.sentence)
        return document if revision else None

    def every(self) -> Iterator[tuple[str, Any]]:
        """Every document with its name, by name; a `Flaw` for one of which no copy holds, which is not said."""
        for name in sorted(self._names()):
            revision, document, flaws = self._latest(name)
            if revision or flaws:
                yield name, document if revision else flaws[0][1]

    def write(self, name: str, document: Any) -> str:
        """Keep a document, in place of an earlier one; in memory where no place can be written.

        Args:
            document: what JSON holds; numbers must be finite.

        Returns:
            Empty if it is on disk, else why it is nowhere.
        """
        return self._write(name, document, self._latest(name)[0] + 1)

    def update(self, name: str, change: Callable[[Any], Any], *, patience_s: float = _PATIENCE_S) -> Any:
        """Read, change and write a document, alone among all processes; gives what was written.

        Args:
            change: takes the document, or None, and gives the new one.
            patience_s: how long another process that changes it is waited for. Then it is changed without the lock.
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
        """Where the document is, in the first place that has it, else where it would be."""
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
            except OSError:  # not there, or not ours to list
                continue
            names |= {name.removesuffix(_END) for name in found if name.endswith(_END)}
        with _memory_guard:
            names |= {name for *here, name in _memory if tuple(here) == self._key("")[:2]}
        return {name for name in names if _NAME.fullmatch(name)}

    def _latest(self, name: str) -> tuple[int, Any, list[tuple[Path, Flaw]]]:
        """Revision and document, (0, None) without one; and what does not hold, with its path."""
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
                flaws.append((path, Flaw("manifest_unreadable", f"{path} is a manifest, and no document")))
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
        say("cache_memory", self.kind, f"{self.kind}/{name} is kept in memory, and is gone when the process ends")
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
    """Whether anything of a kind is kept for an architecture, in any place or in memory; reads nothing of it."""
    with _memory_guard:
        if any(key[0] == kind and key[1].startswith(f"{checked(sm)}/") for key in _memory):
            return True
    return any(os.path.isdir(place.path / checked(kind) / checked(sm)) for place in readable())


def forget_memory(kind: str) -> None:
    """Drop the documents of a kind that are in no place."""
    with _memory_guard:
        for key in [key for key in _memory if key[0] == kind]:
            del _memory[key]


def checked(name: str) -> str:
    """The name of a kind, an architecture or a document.

    Raises:
        ValueError: it is none.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot name an entry; take letters, digits and _.+-, not a dot first")
    return name
