"""Trusted files: files that no other user could have written, opened once, and so safe to load or execute.

A file is trusted if it, and every folder from it up to the root of its cache, belongs to this user or to root and no
other user can write it. Each folder is opened by descriptor from its parent, without following links, and checked
through that descriptor. So the checked file is the one that is read, hashed and loaded, even if the path changes in the
meantime. New files are for this user only, regardless of the umask: folders 0700, files 0600.

In a root that is shared on purpose (``KERNELHUB_CACHE_SHARED=1``) files of its owner are trusted too. Its folders may
be writable by a group; its files may not.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER_MODE, FILE_MODE = 0o700, 0o600
_CLOSE = getattr(os, "O_CLOEXEC", 0)
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _CLOSE
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_FILE = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _NO_LINK | _CLOSE  # opening a pipe would block
_MOST_LINKS = 40  # as Linux follows
_numbers = itertools.count()


class Untrusted(OSError):
    """Another user could have written the file or folder.

    Attributes:
        code: ``"cache_other_user"`` or ``"cache_open_to_others"``.
    """

    def __init__(self, code: str, path: object, reason: str) -> None:
        super().__init__(errno.EACCES, reason, str(path))
        self.code = code


@dataclass(frozen=True)
class Tree:
    """A folder below which files can be trusted.

    Attributes:
        path: absolute.
        owners: users whose files are trusted.
        shared: whether a group may write its folders.
    """

    path: Path
    owners: frozenset[int]
    shared: bool = False

    def check(self, info: os.stat_result, path: object) -> None:
        """Refuse a file or folder that another user could have written.

        Raises:
            Untrusted: it belongs to another user, or other users can write it.
        """
        if info.st_uid not in self.owners:
            raise Untrusted("cache_other_user", path, f"belongs to user {info.st_uid}, this is {os.geteuid()}")
        by_group = 0 if self.shared and stat.S_ISDIR(info.st_mode) else stat.S_IWGRP
        if info.st_mode & (by_group | stat.S_IWOTH):
            mode = stat.S_IMODE(info.st_mode)
            raise Untrusted("cache_open_to_others", path, f"can be written by other users (mode {mode:o})")

    @contextlib.contextmanager
    def folder(self, path: Path | None = None) -> Iterator[int]:
        """Descriptor of a folder of the tree, by default of its root; every folder on the way is checked.

        Raises:
            OSError: it does not exist, is a link, or is `Untrusted`.
        """
        here = os.open(self.path, _FOLDER)
        try:
            self.check(os.fstat(here), self.path)
            reached = self.path
            for part in self._parts(path):
                reached = reached / part
                below = _open(part, _FOLDER | _NO_LINK, here, reached)
                os.close(here)
                here = below
                self.check(os.fstat(here), reached)
            yield here
        finally:
            os.close(here)

    @contextlib.contextmanager
    def opened(self, path: Path) -> Iterator[int]:
        """Descriptor of a regular file of the tree, to read.

        Raises:
            OSError: it does not exist, is a link, a pipe or a device, or is `Untrusted`.
        """
        with self.folder(path.parent) as folder:
            here = _open(path.name, _FILE, folder, path)
        try:
            info = os.fstat(here)
            if not stat.S_ISREG(info.st_mode):
                raise OSError(errno.EINVAL, "is not a regular file", str(path))
            self.check(info, path)
            yield here
        finally:
            os.close(here)

    def read(self, path: Path, most_bytes: int) -> bytes:
        """The bytes of a regular file of the tree, up to a limit.

        Raises:
            OSError: as of `opened`.
        """
        with self.opened(path) as here, os.fdopen(os.dup(here), "rb") as file:
            return file.read(most_bytes)

    def make(self, path: Path) -> None:
        """Create a folder of the tree and its parents up to the root; existing ones are checked.

        Raises:
            OSError: it cannot be created, or a folder on the way is `Untrusted`.
        """
        make_folder(self.path)
        reached = self.path
        for part in self._parts(path):
            with self.folder(reached) as folder:
                reached = reached / part
                _make(part, folder)
        with self.folder(path):
            pass

    def _parts(self, path: Path | None) -> tuple[str, ...]:
        parts = () if path is None else path.relative_to(self.path).parts
        if ".." in parts:
            raise OSError(errno.EINVAL, "is outside of the cache", str(path))
        return parts


def tree(path: Path, *, shared: bool = False) -> Tree:
    """The tree below a folder: files of this user and of root are trusted, in a shared one those of its owner too."""
    owners = {os.geteuid(), 0}
    if shared:
        with contextlib.suppress(OSError):
            owners.add(path.stat().st_uid)
    return Tree(path, frozenset(owners), shared)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, for this user only; existing folders are unchanged."""
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    for folder in reversed(missing):
        _make(str(folder), None)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "is not a folder", str(path))


def create(path: Path, content: bytes) -> None:
    """Write a new file, for this user only.

    Raises:
        FileExistsError: the path exists, also as a dangling link.
    """
    here = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK | _CLOSE, FILE_MODE)
    with os.fdopen(here, "wb") as file:
        os.fchmod(here, FILE_MODE)  # a umask may have removed even the owner's permissions
        file.write(content)


def close_to_others(folder: Path) -> None:
    """Remove other users' permissions from a compiler's files in a folder of ours."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(FOLDER_MODE if path.is_dir() else FILE_MODE)


def foreign_link(path: Path, links: int = 0) -> Path | None:
    """The first link on a path that another user than this one or root created, and therefore controls."""
    for reached in (*reversed(path.parents), path):
        try:
            info = reached.lstat()
        except OSError:  # does not exist or is not readable, which opening it will report
            return None
        if stat.S_ISLNK(info.st_mode):
            if info.st_uid not in (0, os.geteuid()) or links > _MOST_LINKS:
                return reached
            target = reached.parent / os.readlink(reached) / path.relative_to(reached)
            return foreign_link(Path(os.path.normpath(target)), links + 1)
    return None


def load(descriptor: int, path: Path) -> ctypes.CDLL:
    """Load the library of a checked descriptor; `path` is for messages.

    With /proc it is loaded by descriptor, so that no path is resolved again. The dynamic linker identifies a library by
    name, and descriptor numbers are reused, so each name is used once.

    Raises:
        OSError: it is not a library for this machine.
    """
    name = f"/proc/self/fd/{'./' * next(_numbers)}{descriptor}"
    try:
        return ctypes.CDLL(name if os.path.exists(name) else str(path))
    except OSError as error:
        raise OSError(f"{path} cannot be loaded: {str(error).replace(name, path.name)}") from None


def _open(name: str, flags: int, folder: int, path: Path) -> int:
    """os.open below a folder, with the whole path in its errors."""
    try:
        return os.open(name, flags, dir_fd=folder)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _make(name: str, folder: int | None) -> None:
    try:
        os.mkdir(name, FOLDER_MODE, dir_fd=folder)
    except FileExistsError:
        return
    os.chmod(name, FOLDER_MODE, dir_fd=folder)  # a umask may have removed even the owner's permissions
