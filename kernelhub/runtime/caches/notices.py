"""Notices of the caches, each reported once with a stable code and a remedy; and callbacks before entries are made."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger("kernelhub.caches")

# code: (meaning, remedy). docs/caches.md contains this table; a test compares the two.
CODES = {
    "cache_not_a_folder": (
        "A file or a dangling link is in place of the folder; the next place is used.",
        "set KERNELHUB_CACHE_DIR to a folder",
    ),
    "cache_unwritable": (
        "The folder's permissions forbid writing; its contents are still read, and the next place is written.",
        "set KERNELHUB_CACHE_DIR to a writable folder",
    ),
    "cache_read_only": (
        "The file system is mounted read-only; its contents are still read, and the next place is written.",
        "set KERNELHUB_CACHE_DIR to a writable folder, or fill the folder when the image is built",
    ),
    "cache_full": (
        "The disk or the quota is full; the next place is written.",
        "free space (`kernelhub cache list` lists the caches and their sizes), or set KERNELHUB_CACHE_DIR",
    ),
    "cache_other_user": (
        "The folder, or a link on its path, belongs to another user, who could place code there: it is neither read "
        "nor written, and the next place is used. Root's folders are read if no other user can write them.",
        "set KERNELHUB_CACHE_DIR to a folder of this user, or to one that does not exist yet; KERNELHUB_CACHE_SHARED=1 "
        "allows reading another user's folder",
    ),
    "cache_open_to_others": (
        "Other users can write the folder and could place code there: it is neither read nor written, and the next "
        "place is used.",
        "`chmod -R go-w` the folder if no other user has written it, or name a new folder in it, which kernelhub "
        "creates for this user only",
    ),
    "cache_shared": (
        "KERNELHUB_CACHE_SHARED is set: files of the folder's owner are trusted, and nothing is written there.",
        "nothing to do if you trust the named owner; else unset KERNELHUB_CACHE_SHARED",
    ),
    "entry_untrusted": (
        "A file or folder of an entry belongs to another user, or other users can write it: a miss.",
        "remove it (`kernelhub cache clear --stale`), and find out which user created it",
    ),
    "cache_no_home": (
        "HOME is not set and this user has no home, so there is no folder for the cache.",
        "set HOME or KERNELHUB_CACHE_DIR",
    ),
    "cache_noexec": (
        "The file system is mounted noexec: compiled libraries in it cannot be loaded; the next place is used.",
        "set KERNELHUB_CACHE_DIR to a folder of a file system without noexec",
    ),
    "cache_memory": (
        "No place is writable: documents stay in memory until the process ends.",
        "set KERNELHUB_CACHE_DIR to a writable folder",
    ),
    "cache_unavailable": (
        "No place is writable, and the request needs a file.",
        "set KERNELHUB_CACHE_DIR to a writable folder",
    ),
    "manifest_missing": ("An entry without its manifest is a miss.", "nothing to do: it is made again"),
    "manifest_unreadable": (
        "A truncated or invalid manifest is a miss.",
        "nothing to do: it is made again",
    ),
    "manifest_edited": (
        "A manifest or document whose digest does not match was changed after it was written: a miss.",
        "nothing to do: it is made again",
    ),
    "manifest_foreign": (
        "An entry for another source, compiler, library, device or format that was copied here is a miss.",
        "nothing to do: it is made again",
    ),
    "file_missing": ("A file that the manifest lists does not exist: a miss.", "nothing to do: it is made again"),
    "file_truncated": ("A file is shorter or longer than it was written: a miss.", "nothing to do: it is made again"),
    "file_edited": ("A file's contents are not those that were written: a miss.", "nothing to do: it is made again"),
    "entry_symlink": (
        "An entry, or a file in it, is a symbolic link, which the caches never create: a miss.",
        "remove the link",
    ),
    "entry_unreadable": (
        "An entry cannot be read (permissions, an I/O error, a stale NFS handle): a miss.",
        "check the folder's permissions and the file system",
    ),
    "lock_wait": ("Another process makes the entry; this one waits for it.", "nothing to do: the wait has a time-out"),
    "lock_dead_holder": (
        "The process that held a lock on this machine has ended: its lock was taken over.",
        "nothing to do: its unfinished work is repeated",
    ),
    "lock_reused_pid": (
        "A lock's process id now belongs to another process: the lock was taken over.",
        "nothing to do: the unfinished work of its holder is repeated",
    ),
    "lock_expired": (
        "The holder of a lock, on another machine or in another container, sends no heartbeat: taken over.",
        "nothing to do: if it still runs, both make the same entry and either is valid",
    ),
    "lock_unreadable": (
        "An old lock file that names no holder was taken over.",
        "nothing to do: its writer died, or the disk was full",
    ),
    "lock_left": (
        "A released lock could not be removed; others take it over when this process has ended.",
        "check why the folder is no longer writable",
    ),
    "lock_timeout": (
        "A lock was not released in time: the entry is made without it, concurrently with the holder.",
        "check the named process, and end it if it hangs",
    ),
}


@dataclass(frozen=True)
class Notice:
    """One report of the caches.

    Attributes:
        code: a key of `CODES`.
        subject: the folder, entry or lock concerned.
        sentence: what happened.
        remedy: what to do.
    """

    code: str
    subject: str
    sentence: str
    remedy: str


_said: dict[tuple[str, str], Notice] = {}
_guard = threading.Lock()


def say(code: str, subject: object, sentence: str) -> Notice:
    """Log a warning, unless the same was reported for the same subject before."""
    notice = Notice(code, str(subject), sentence, CODES[code][1])
    with _guard:
        first = _said.setdefault((code, notice.subject), notice) is notice
    if first:
        log.warning("%s: %s; %s", code, sentence, notice.remedy)
    return notice


def cache_notices() -> tuple[Notice, ...]:
    """All notices of the caches of this process, in order.

    Example:
        >>> import kernelhub
        >>> any(notice.code == "cache_full" for notice in kernelhub.cache_notices())
        False
    """
    with _guard:
        return tuple(_said.values())


def forget() -> None:
    """Clear the notices, so that they are reported again."""
    with _guard:
        _said.clear()


def _renew() -> None:
    global _guard
    _guard = threading.Lock()  # another thread may have held it when the process forked


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


_watchers: list[Callable[[str, str], object]] = []


def before_making(notify: Callable[[str, str], object]) -> Callable[[], None]:
    """Register `notify`, called with kind and name before an entry is made or waited for; its error prevents that.

    Returns:
        A function that removes the registration.
    """
    _watchers.append(notify)
    return lambda: _watchers.remove(notify)


def announce(kind: str, name: str) -> None:
    """Notify all registered functions that an entry is about to be made or waited for."""
    for notify in tuple(_watchers):
        notify(kind, name)
