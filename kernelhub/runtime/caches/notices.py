"""What the caches report: notices, once each with a stable code and a remedy, and what is about to be made."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger("kernelhub.caches")

# code: (what it means, what to do). docs/caches.md shows this table; a test holds the two together.
CODES = {
    "cache_not_a_folder": (
        "A file, or a link that leads nowhere, is where a folder should be; the next place is taken.",
        "set KERNELHUB_CACHE_DIR to a folder",
    ),
    "cache_unwritable": (
        "The folder's permissions forbid writing; what is in it is still read, and the next place is written.",
        "set KERNELHUB_CACHE_DIR to a writable folder",
    ),
    "cache_read_only": (
        "The file system is mounted read-only; what is in it is still read, and the next place is written.",
        "set KERNELHUB_CACHE_DIR to a writable folder, or fill the folder when the image is built",
    ),
    "cache_full": (
        "The disk or the quota is full; the next place is written.",
        "free space (`kernelhub cache list` says what lies where), or set KERNELHUB_CACHE_DIR",
    ),
    "cache_other_user": (
        "The folder, or a link on its path, belongs to another user, who could put code there: it is neither read nor "
        "filled, and the next place is taken. Of root's folders what nobody else can write is read.",
        "set KERNELHUB_CACHE_DIR to a folder of this user, or to one that is not there yet; KERNELHUB_CACHE_SHARED=1 "
        "reads another user's folder on purpose",
    ),
    "cache_open_to_others": (
        "The folder can be written by other users, who could put code there: it is neither read nor filled, and the "
        "next place is taken.",
        "`chmod -R go-w` the folder if nobody else has written it, or name one in it that is not there yet, which "
        "kernelhub makes for this user alone",
    ),
    "cache_shared": (
        "KERNELHUB_CACHE_SHARED is set: what the folder's owner put there is believed, and nothing is written there.",
        "nothing to do if the owner who is named is to be trusted; else unset KERNELHUB_CACHE_SHARED",
    ),
    "entry_untrusted": (
        "A file or folder of an entry belongs to another user, or can be written by other users: a miss.",
        "remove it (`kernelhub cache clear --stale`), and look who put it there",
    ),
    "cache_no_home": (
        "HOME is not set and this user has no home, so there is no folder for what should be kept.",
        "set HOME or KERNELHUB_CACHE_DIR",
    ),
    "cache_noexec": (
        "The file system is mounted noexec: compiled libraries in it cannot be loaded; the next place is taken.",
        "set KERNELHUB_CACHE_DIR to a folder of a file system without noexec",
    ),
    "cache_memory": (
        "No place can be written: documents are kept in memory until the process ends.",
        "set KERNELHUB_CACHE_DIR to a writable folder",
    ),
    "cache_unavailable": (
        "No place can be written, and what was asked for needs a file.",
        "set KERNELHUB_CACHE_DIR to a writable folder",
    ),
    "manifest_missing": ("An entry without its manifest is a miss.", "nothing to do: it is made again"),
    "manifest_unreadable": (
        "A manifest that is truncated, or is not one, is a miss.",
        "nothing to do: it is made again",
    ),
    "manifest_edited": (
        "A manifest or document whose own digest does not hold was changed after it was written: a miss.",
        "nothing to do: it is made again",
    ),
    "manifest_foreign": (
        "An entry made for another source, compiler, library, device or format, which was copied here, is a miss.",
        "nothing to do: it is made again",
    ),
    "file_missing": ("A file that the manifest lists is not there: a miss.", "nothing to do: it is made again"),
    "file_truncated": ("A file is shorter or longer than it was made: a miss.", "nothing to do: it is made again"),
    "file_edited": ("A file's contents are not those that were made: a miss.", "nothing to do: it is made again"),
    "entry_symlink": (
        "An entry, or a file in it, is a symbolic link, which the caches never make: a miss.",
        "remove the link",
    ),
    "entry_unreadable": (
        "An entry cannot be read (permissions, an I/O error, a stale NFS handle): a miss.",
        "check the folder's permissions and the file system",
    ),
    "lock_wait": ("Another process makes the entry; this one waits for it.", "nothing to do: the wait has a time-out"),
    "lock_dead_holder": (
        "The process that held a lock on this machine is gone: its lock was taken over.",
        "nothing to do: what it had begun is made again",
    ),
    "lock_reused_pid": (
        "A lock's process id belongs to another process by now: the lock was taken over.",
        "nothing to do: what its holder had begun is made again",
    ),
    "lock_expired": (
        "The holder of a lock, on another machine or in another container, has given no sign of life: taken over.",
        "nothing to do: if it still runs, both make the same entry and either is good",
    ),
    "lock_unreadable": (
        "A lock file that does not say whose it is, and is old, was taken over.",
        "nothing to do: its writer died, or the disk was full",
    ),
    "lock_left": (
        "A lock could not be removed when it was given up; others take it over when this process has ended.",
        "check why the folder can no longer be written",
    ),
    "lock_timeout": (
        "A lock was not given up in time: the entry is made without it, beside the holder.",
        "look at the process that is named; end it if it hangs",
    ),
}


@dataclass(frozen=True)
class Notice:
    """One thing that was said.

    Attributes:
        code: a key of `CODES`.
        subject: what it is about: a folder, an entry, a lock.
        sentence: what was seen.
        remedy: what to do.
    """

    code: str
    subject: str
    sentence: str
    remedy: str


_said: dict[tuple[str, str], Notice] = {}
_guard = threading.Lock()


def say(code: str, subject: object, sentence: str) -> Notice:
    """Log a warning, unless the same was said of the same subject before."""
    notice = Notice(code, str(subject), sentence, CODES[code][1])
    with _guard:
        first = _said.setdefault((code, notice.subject), notice) is notice
    if first:
        log.warning("%s: %s; %s", code, sentence, notice.remedy)
    return notice


def cache_notices() -> tuple[Notice, ...]:
    """Everything the caches of this process have said, in order.

    Example:
        >>> import kernelhub
        >>> any(notice.code == "cache_full" for notice in kernelhub.cache_notices())
        False
    """
    with _guard:
        return tuple(_said.values())


def forget() -> None:
    """Say everything anew."""
    with _guard:
        _said.clear()


def _renew() -> None:
    global _guard
    _guard = threading.Lock()  # another thread may have held it when the process forked


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


_watchers: list[Callable[[str, str], object]] = []


def before_making(notify: Callable[[str, str], object]) -> Callable[[], None]:
    """Have `notify` called with kind and name before an entry is made or waited for; what it raises prevents it.

    Returns:
        A function that ends this.
    """
    _watchers.append(notify)
    return lambda: _watchers.remove(notify)


def announce(kind: str, name: str) -> None:
    """Tell all who asked that an entry is about to be made or waited for."""
    for notify in tuple(_watchers):
        notify(kind, name)
