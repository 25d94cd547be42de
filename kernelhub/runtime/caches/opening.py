"""Opening what others may have put there: a pipe in the place of a file would keep its reader waiting for ever."""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path

_AT_ONCE = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)


def opened(path: Path) -> BufferedReader:
    """A file to read, of any kind; it is open at once."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | _AT_ONCE))


def contents(path: Path, most_bytes: int = -1) -> bytes:
    """The bytes of an ordinary file, at most so many.

    Raises:
        OSError: it is not there, cannot be read, or is a pipe, a device or a folder.
    """
    with opened(path) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is no ordinary file")
        return file.read(most_bytes)
