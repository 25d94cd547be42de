"""One attempt to keep something in one place. What fails there is a `PlaceError`, after which the next is tried."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path

from kernelhub.errors import LockTimeout
from kernelhub.runtime.caches.lock import Held, OnWait, lock
from kernelhub.runtime.caches.manifest import synchronise
from kernelhub.runtime.caches.notices import say
from kernelhub.runtime.caches.root import PLACE_ERRORS, Place, code_of, fails
from kernelhub.runtime.caches.trusted import FILE_MODE, Untrusted, create

# What a maker may suffer from the place that it writes to; of any other error it is the cause itself.
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ESTALE, errno.EIO)


class PlaceError(Exception):
    """A place could not be used after all.

    Attributes:
        place: the place.
        code: a key of `notices.CODES`.
        reason: what the operating system said.
    """

    def __init__(self, place: Place, code: str, reason: str) -> None:
        super().__init__(reason)
        self.place, self.code, self.reason = place, code, reason

    def say(self) -> None:
        """Tell it, once for each place, and have the places behind it read from now on."""
        fails(self.place)
        say(self.code, self.place.path, f"nothing can be kept in {self.place.path}: {self.reason}")


@contextlib.contextmanager
def watching(place: Place, errors: Collection[int] = tuple(PLACE_ERRORS)) -> Iterator[None]:
    """Turn those errors of the operating system that speak of the place into a `PlaceError`."""
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
    """Hold the lock of one entry; None is held if its holder did not give it up in time, which is said."""
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
    """Put a text in place of a file, whole or not at all, and on disk before this returns."""
    making = path.with_name(f".{path.name}.making-{uuid.uuid4().hex}")
    try:
        create(making, text.encode())
        making.chmod(mode)
        synchronise(making)
        try:
            os.replace(making, path)
        except IsADirectoryError:  # which nobody of ours put there
            aside = path.with_name(f".{path.name}.bad-{uuid.uuid4().hex}")
            os.rename(path, aside)
            os.replace(making, path)
            shutil.rmtree(aside, ignore_errors=True)
        synchronise(path.parent)
    finally:
        with contextlib.suppress(FileNotFoundError):
            making.unlink()
