"""Bounded reading of files of installed packages: regular files of limited size, in any encoding.

Their authors are unknown: a file may be a pipe, hundreds of megabytes long, or have no valid encoding. None of these
may cost a caller more than milliseconds, or fail more than the one query.
"""

from __future__ import annotations

import io
import os
import re
import stat
from pathlib import Path

SOURCE_BYTES = 4 << 20  # the longest generated modules of the libraries that are read have less than a tenth
METADATA_BYTES = 1 << 20  # headers alone; a description may follow them, and is not read
RECORD_BYTES = 16 << 20  # torch's lists 14,000 files in 1.5 MB
_PIECE_BYTES = 1 << 16
_CODING = re.compile(rb"[ \t\f]*#.*?coding[:=]")  # PEP 263, in the first two lines


class Unreadable(ValueError):
    """A file that cannot or may not be read; the text says which, and why.

    Attributes:
        code: ``"too_large"``, ``"not_a_file"`` or ``"unreadable"``.
    """

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def read_source(path: Path) -> str:
    """The text of a Python file; if the file declares another encoding than UTF-8, only its ASCII is reliable.

    Raises:
        Unreadable: it is not a regular file, is longer than `SOURCE_BYTES`, or does not match its encoding.
    """
    content = read_bytes(path, SOURCE_BYTES)
    try:
        content.decode()
    except UnicodeDecodeError as error:
        if not any(_CODING.match(line) for line in content.split(b"\n", 2)[:2]):
            raise Unreadable("unreadable", f"{path} is not in UTF-8: {error.reason}") from None
    return decoded(content)


def read_bytes(path: Path, most_bytes: int, until: tuple[bytes, ...] = ()) -> bytes:
    """The content of a file.

    Args:
        path: the file; a pipe or a device of that name does not block.
        most_bytes: a longer file is refused, before reading if its length is known.
        until: reading ends after the first of these; the limit covers only what comes before.

    Raises:
        Unreadable: it is not a regular file, cannot be read, or is too long.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except (OSError, ValueError) as error:
        raise Unreadable("unreadable", f"{path}: {getattr(error, 'strerror', None) or error}") from None
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise Unreadable("not_a_file", f"{path} is not a regular file")
        if about.st_size > most_bytes and not until:
            raise _too_large(path, most_bytes)
        try:
            return _read(file, path, most_bytes, until)
        except OSError as error:
            raise Unreadable("unreadable", f"{path}: {error.strerror or error}") from None


def decoded(content: bytes) -> str:
    """Text of bytes in any encoding: what is not UTF-8 becomes U+FFFD, ASCII is unchanged."""
    return content.removeprefix(b"\xef\xbb\xbf").decode("utf-8", errors="replace").replace("\r\n", "\n")


def _read(file: io.RawIOBase, path: Path, most_bytes: int, until: tuple[bytes, ...]) -> bytes:
    content = bytearray()
    while piece := file.read(min(_PIECE_BYTES if until else most_bytes, most_bytes + 1 - len(content))):
        searched = max(0, len(content) - max(map(len, until), default=0))
        content += piece
        ends = [at for mark in until if (at := content.find(mark, searched)) >= 0]
        if ends:
            return bytes(content[: min(ends)])
        if len(content) > most_bytes:
            raise _too_large(path, most_bytes)
    return bytes(content)


def _too_large(path: Path, most_bytes: int) -> Unreadable:
    return Unreadable("too_large", f"{path} is larger than the limit of {most_bytes >> 20} MB")
