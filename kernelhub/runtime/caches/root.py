"""Where things are kept: the folder the user names, else the user's cache, else the user's own temporary folder.

A place is judged from permissions and mounts, without writing; it is made when something is first kept in it. The
first that can be written is; those before it are read too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kernelhub.probes.finding import Finding, found, lacking
from kernelhub.runtime.caches.notices import CODES, say

VARIABLE = "KERNELHUB_CACHE_DIR"
TAG = "CACHEDIR.TAG"  # https://bford.info/cachedir/: backups leave such a folder out
_TAG_TEXT = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# Compiled kernels and measurements of kernelhub; `kernelhub cache clear kernelhub` empties it.\n"
)
_LEAST_BYTES = 256 << 10  # of free space; a folder with less holds no compiled source

# What the operating system says when a place is of no use, as the code that is said of it.
PLACE_ERRORS = {
    errno.EROFS: "cache_read_only",
    errno.EACCES: "cache_unwritable",
    errno.EPERM: "cache_unwritable",
    errno.ENOSPC: "cache_full",
    errno.EDQUOT: "cache_full",
    errno.EFBIG: "cache_full",
    errno.ENOTDIR: "cache_not_a_folder",
    errno.EEXIST: "cache_not_a_folder",
    errno.ENOENT: "cache_not_a_folder",
    errno.ELOOP: "cache_not_a_folder",
    errno.ESTALE: "cache_unwritable",
    errno.EIO: "cache_unwritable",
}


_failed: set[Path] = set()  # places that failed in use, in this process


@dataclass(frozen=True)
class Place:
    """A folder that may hold the cache.

    Attributes:
        path: absolute.
        origin: ``"KERNELHUB_CACHE_DIR"``, ``"XDG_CACHE_HOME"``, ``"home"`` or ``"temporary"``.
    """

    path: Path
    origin: str

    def judge(self, *, executable: bool = False) -> Finding:
        """Could something be kept here? Codes of a bad answer are those of `notices.CODES`.

        Args:
            executable: whether what is kept is loaded as code, which ``noexec`` forbids.
        """
        nearest = next(folder for folder in (self.path, *self.path.parents) if os.path.lexists(folder))
        if not nearest.is_dir():
            return self._bad("cache_not_a_folder", f"{nearest} is not a folder")
        owner = self._foreign_owner(nearest)
        if owner is not None:
            return self._bad("cache_other_user", f"{nearest} belongs to user {owner}, this is {os.geteuid()}")
        mount = os.statvfs(nearest)
        if not os.access(nearest, os.W_OK | os.X_OK):
            if mount.f_flag & os.ST_RDONLY:
                return self._bad("cache_read_only", f"{nearest} is on a read-only file system")
            owner = nearest.stat().st_uid
            if nearest == self.path and owner != os.geteuid():
                return self._bad("cache_other_user", f"{nearest} belongs to user {owner}, this is {os.geteuid()}")
            return self._bad("cache_unwritable", f"{nearest} is not writable for user {os.geteuid()}")
        if executable and mount.f_flag & getattr(os, "ST_NOEXEC", 0):
            return self._bad("cache_noexec", f"{nearest} is on a file system mounted noexec")
        if mount.f_blocks and mount.f_bavail * mount.f_frsize < _LEAST_BYTES:
            return self._bad("cache_full", f"{nearest} has {mount.f_bavail * mount.f_frsize} free bytes")
        return found(str(self.path), str(self.path), f"{self.path} is writable")

    def trusted(self, *, executable: bool = False) -> bool:
        """Whether what lies here may be read: a default place of another user may not, since code is loaded from it.

        Args:
            executable: whether it is loaded as code, which ``noexec`` forbids.
        """
        try:
            if executable and os.statvfs(self.path).f_flag & getattr(os, "ST_NOEXEC", 0):
                return False
            return self.path.is_dir() and self._foreign_owner(self.path) is None
        except OSError:
            return False

    def make(self) -> None:
        """Make the folder, and mark it as a cache."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o777 if self.origin == VARIABLE else 0o700)
        if self._foreign_owner(self.path) is not None:
            raise PermissionError(errno.EACCES, "belongs to another user", str(self.path))
        with contextlib.suppress(FileExistsError), (self.path / TAG).open("x") as file:
            file.write(_TAG_TEXT)

    def _foreign_owner(self, folder: Path) -> int | None:
        """User whose folder this is, where that keeps us from it.

        A folder that the user named may be anybody's. In the temporary folder anybody can make what we look for, so
        there a link, or a folder that others can write, is foreign too.
        """
        if self.origin == VARIABLE:
            return None
        told = folder.lstat() if self.origin == "temporary" else folder.stat()
        mine = told.st_uid == os.geteuid()
        if folder != self.path:  # the place itself is yet to be made; a superuser would fill another user's home
            return None if mine or os.geteuid() != 0 else told.st_uid
        if self.origin == "temporary":
            mine = mine and stat.S_ISDIR(told.st_mode) and not told.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        return None if mine else told.st_uid

    def _bad(self, code: str, reason: str) -> Finding:
        return lacking(str(self.path), code, reason, CODES[code][1])


def places(environ: Mapping[str, str] | None = None) -> tuple[Place, ...]:
    """The places that are tried, best first. Nothing is looked at on disk."""
    environ = os.environ if environ is None else environ
    result = []
    if environ.get(VARIABLE):
        result.append(Place(Path(os.path.abspath(os.path.expanduser(environ[VARIABLE]))), VARIABLE))
    home = home_folder(environ)
    if os.path.isabs(environ.get("XDG_CACHE_HOME", "")):
        result.append(Place(Path(environ["XDG_CACHE_HOME"], "kernelhub"), "XDG_CACHE_HOME"))
    elif home is not None:
        result.append(Place(home / ".cache" / "kernelhub", "home"))
    result.append(Place(_temporary_folder(environ) / f"kernelhub-{os.geteuid()}", "temporary"))
    return tuple(result)


def home_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """The user's home: HOME, else that of the user's account; None where neither is an absolute path."""
    environ = os.environ if environ is None else environ
    path = environ.get("HOME", "")
    with contextlib.suppress(KeyError, ImportError):  # a user without an account, as containers have
        import pwd

        path = path if os.path.isabs(path) else pwd.getpwuid(os.getuid()).pw_dir
    return Path(path) if os.path.isabs(path) else None


def usable(*, executable: bool = False) -> Iterator[Place]:
    """Places that can be written, best first. What is wrong with those passed over is said as they are passed."""
    if home_folder() is None and not os.environ.get(VARIABLE):
        say("cache_no_home", "HOME", "neither HOME nor this user's account names a home")
    for place in places():
        finding = judged(place, executable)
        if finding.ok:
            yield place
        else:
            say(finding.code, place.path, f"nothing can be kept in {place.path}: {finding.reason}")


def readable(*, executable: bool = False) -> list[Place]:
    """Places that are read, best first: as far as the first that can be written, so that what is there decides.

    A folder that is named and can be filled is filled, whatever lies in the user's own; one that cannot is read first.
    """
    result = []
    for place in places():
        if place.trusted(executable=executable):
            result.append(place)
        if place.path not in _failed and judged(place, executable).ok:
            break
    return result


def fails(place: Place) -> None:
    """Note that writing failed, though nothing had spoken against it: from now on what lies behind it is read too."""
    _failed.add(place.path)


def best(*, executable: bool = False) -> Finding:
    """The place that would be written, or why the first cannot be. Says nothing, writes nothing."""
    answers = [judged(place, executable) for place in places()]
    good = next((answer for answer in answers if answer.ok), None)
    if good is not None:
        return good
    first, others = answers[0], "".join(f"; {answer.reason}" for answer in answers[1:])
    return lacking(first.subject, first.code, first.reason + others, f"set {VARIABLE} to a writable folder")


def keeps(kind: str, *, executable: bool = False) -> Finding:
    """Could things of a kind be had: made and kept, or found in a place that was filled before? Writes nothing."""
    finding = best(executable=executable)
    filled = (
        None
        if finding.ok
        else next(
            (place for place in places() if place.trusted(executable=executable) and (place.path / kind).is_dir()), None
        )
    )
    if filled is None:
        return finding
    return found(str(filled.path), str(filled.path), f"{filled.path} was filled before; {finding.reason}")


def code_of(error: OSError) -> str | None:
    """The code of an error that makes a place useless; None for any other error."""
    return PLACE_ERRORS.get(error.errno or 0)


def judged(place: Place, executable: bool) -> Finding:
    """As `Place.judge`, also of a place that does not answer."""
    try:
        return place.judge(executable=executable)
    except OSError as error:  # a mount that has gone away answers nothing
        code = code_of(error) or "cache_unwritable"
        return lacking(str(place.path), code, f"{place.path}: {error.strerror or error}", CODES[code][1])


def _temporary_folder(environ: Mapping[str, str]) -> Path:
    """As `tempfile` takes it from the environment, but without trying to write."""
    named = (environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP"))
    return Path(next((path for path in named if os.path.isabs(path)), "/tmp"))
