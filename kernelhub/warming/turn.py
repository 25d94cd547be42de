"""One compiling process per node: the first one compiles; the others wait and then load the results from disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernelhub.runtime.caches.lock import OnWait, lock, myself
from kernelhub.runtime.caches.root import usable
from kernelhub.runtime.caches.store import PlaceError, watching


@dataclass
class Turn:
    """The wait for the node's lock.

    Attributes:
        waited_s: seconds of waiting for another process.
        waited_for: that process, as text; empty without one.
        note: why there was no lock; empty if there was one.
    """

    waited_s: float = 0.0
    waited_for: str = ""
    note: str = ""


@contextlib.contextmanager
def turn(timeout_s: float, on_wait: OnWait) -> Iterator[Turn]:
    """Hold the node's lock for compilation within the block.

    Raises:
        LockTimeout: another process kept the lock for longer than `timeout_s`; the message names it.
    """
    mine = Turn()

    def waiting(holder: str, waited_s: float) -> None:
        mine.waited_for, mine.waited_s = holder, waited_s
        on_wait(holder, waited_s)

    path = _path()
    if path is None:
        mine.note = "no cache folder is writable, so all processes of this node compile the same items"
        yield mine
        return
    with lock(path, timeout_s=timeout_s, on_wait=waiting):
        yield mine


def _path() -> Path | None:
    """The node's lock, named by host and boot, since nodes may share the folder; None if no folder is writable."""
    me = myself("")
    for place in usable():
        try:
            with watching(place):
                place.make()
                folder = place.path / "warmup"
                place.tree().make(folder)
                name = "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in me.host)
                return folder / f"{name}-{me.boot[:8]}.lock"
        except PlaceError as failed:
            failed.say()
    return None
