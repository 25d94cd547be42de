"""One compiler per node: who comes first compiles, the others wait for it and then load what it left on disk."""

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
    """Whose turn it was.

    Attributes:
        waited_s: how long another process was waited for.
        waited_for: that process, as words; empty if none was.
        note: why there was no lock, if there was none.
    """

    waited_s: float = 0.0
    waited_for: str = ""
    note: str = ""


@contextlib.contextmanager
def turn(timeout_s: float, on_wait: OnWait) -> Iterator[Turn]:
    """Be the only process of this node that compiles, as long as the block lasts.

    Raises:
        LockTimeout: another process kept on for longer than that; it is named.
    """
    mine = Turn()

    def waiting(holder: str, waited_s: float) -> None:
        mine.waited_for, mine.waited_s = holder, waited_s
        on_wait(holder, waited_s)

    path = _path()
    if path is None:
        mine.note = "no cache folder can be written, so processes of this node compile the same at the same time"
        yield mine
        return
    with lock(path, timeout_s=timeout_s, on_wait=waiting):
        yield mine


def _path() -> Path | None:
    """The node's lock: named by host and boot, since nodes may share the folder; None if no folder can be written."""
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
