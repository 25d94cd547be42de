"""A document that stands alone on standard output: what libraries print there meanwhile goes to standard error."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import sys
from collections.abc import Iterator
from typing import IO


@contextlib.contextmanager
def alone_on_stdout() -> Iterator[IO[str]]:
    """Standard output for the caller alone; what Python, C and child processes print there goes to standard error."""
    stdout, stderr = sys.stdout, sys.stderr
    try:
        number, elsewhere = stdout.fileno(), stderr.fileno()
    except (OSError, ValueError, io.UnsupportedOperation):  # replaced by a stream in memory, as notebooks do
        with contextlib.redirect_stdout(stderr):
            yield stdout
        return
    stdout.flush()
    kept = os.dup(number)
    os.dup2(elsewhere, number)
    try:
        with (
            contextlib.redirect_stdout(stderr),
            os.fdopen(os.dup(kept), "w", encoding=stdout.encoding, errors=stdout.errors) as stream,
        ):
            yield stream
    finally:
        stderr.flush()
        ctypes.CDLL(None).fflush(None)  # what C holds back would follow the document otherwise
        os.dup2(kept, number)
        os.close(kept)
