"""The root folders of the cache: the configured folder, else the user's cache, else the user's own temporary folder.

A place is checked by owners, permissions and mounts, without writing, and created at its first use. The first writable
place is written; earlier places are read too, if no other user can write them.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kernelhub.probes.finding import Finding, found, lacking
from kernelhub.runtime.caches.notices import CODES, say
from kernelhub.runtime.caches.trusted import Tree, Untrusted, create, foreign_link, make_folder, tree

VARIABLE = "KERNELHUB_CACHE_DIR"
SHARED = "KERNELHUB_CACHE_SHARED"
TAG = "CACHEDIR.TAG"  # https://bford.info/cachedir/: backups leave such a folder out
_TAG_TEXT = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# Compiled kernels and measurements of kernelhub; `kernelhub cache clear kernelhub` empties it.\n"
)
_LEAST_BYTES = 256 << 10  # of free space; a folder with less holds no compiled source

# Errors of the operating system that make a place unusable -> code of the notice.
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
    errno.ENAMETOOLONG: "cache_not_a_folder",
    errno.EMFILE: "cache_unwritable",
    errno.ENFILE: "cache_unwritable",
    errno.ESTALE: "cache_unwritable",
    errno.EIO: "cache_unwritable",
}


_ON = ("1", "true", "yes", "on")
_failed: set[Path] = set()  # places that failed in use, in this process


@dataclass(frozen=True)
class Place:
    """A folder that may hold the cache.

    Attributes:
        path: absolute.
        origin: ``"KERNELHUB_CACHE_DIR"``, ``"XDG_CACHE_HOME"``, ``"home"`` or ``"temporary"``.
        shared: whether it belongs to another user on purpose; it is read and not written.
    """

    path: Path
    origin: str
    shared: bool = False

    def judge(self, *, executable: bool = False) -> Finding:
        """Whether the place can be written. Codes of a negative finding are those of `notices.CODES`.

        Args:
            executable: whether files are loaded as code, which ``noexec`` forbids.
        """
        if not self.path.is_absolute():
            return self._bad("cache_not_a_folder", f"{self.path} does not resolve: no such home or working directory")
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self.path.lstat()  # reports a name that is too long before the folder is created
        nearest = next(folder for folder in (self.path, *self.path.parents) if os.path.lexists(folder))
        if not nearest.is_dir():
            return self._bad("cache_not_a_folder", f"{nearest} is not a folder")
        foreign = self._foreign(nearest)
        if foreign is not None:
            return self._bad(*foreign)
        if self.shared:
            return self._bad("cache_shared", f"{self.path} is shared, and therefore read-only")
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
        """Whether files here may be read: no other user can have written them.

        Args:
            executable: whether they are loaded as code, which ``noexec`` forbids.
        """
        try:
            if executable and os.statvfs(self.path).f_flag & getattr(os, "ST_NOEXEC", 0):
                return False
            return self.path.is_absolute() and self.path.is_dir() and self._foreign(self.path) is None
        except OSError:
            return False

    def refused(self) -> tuple[str, str] | None:
        """Code and reason for an existing folder that may not be read; None for any other folder."""
        try:
            return self._foreign(self.path) if self.path.is_absolute() and self.path.is_dir() else None
        except OSError:
            return None

    def tree(self) -> Tree:
        """The tree of files below it."""
        return tree(self.path, shared=self.shared)

    def make(self) -> None:
        """Create the folder, and mark it as a cache."""
        make_folder(self.path)
        foreign = self._foreign(self.path)
        if foreign is not None:
            raise Untrusted(foreign[0], self.path, foreign[1])
        with contextlib.suppress(FileExistsError):
            create(self.path / TAG, _TAG_TEXT.encode())

    def _foreign(self, folder: Path) -> tuple[str, str] | None:
        """Code and reason if another user controls the contents, or root would write into another user's home."""
        link = foreign_link(folder)
        if link is not None:
            return "cache_other_user", f"{link} is a link that user {link.lstat().st_uid} created"
        info = folder.stat()
        if folder != self.path:  # the place itself will be created for this user only
            if os.geteuid() != 0 or info.st_uid == 0 or self.origin == VARIABLE:
                return None
            return "cache_other_user", f"{folder} belongs to user {info.st_uid}, this is 0"
        if self.origin == "temporary" and (folder.is_symlink() or info.st_uid != os.geteuid()):
            return "cache_other_user", f"user {folder.lstat().st_uid} created {folder}"
        try:
            self.tree().check(info, folder)
        except Untrusted as refused:
            return refused.code, f"{folder} {refused.strerror}"
        return None

    def _bad(self, code: str, reason: str) -> Finding:
        return lacking(str(self.path), code, reason, CODES[code][1])


def places(environ: Mapping[str, str] | None = None) -> tuple[Place, ...]:
    """The candidate places, best first, without reading the disk."""
    environ = os.environ if environ is None else environ
    result = []
    if environ.get(VARIABLE, "").strip():
        shared = environ.get(SHARED, "").strip().lower() in _ON
        result.append(Place(absolute(environ[VARIABLE]) or Path(environ[VARIABLE]), VARIABLE, shared))
    home = home_folder(environ)
    if os.path.isabs(environ.get("XDG_CACHE_HOME", "")):
        result.append(Place(Path(environ["XDG_CACHE_HOME"], "kernelhub"), "XDG_CACHE_HOME"))
    elif home is not None:
        result.append(Place(home / ".cache" / "kernelhub", "home"))
    result.append(Place(_temporary_folder(environ) / f"kernelhub-{os.geteuid()}", "temporary"))
    return tuple(result)


def absolute(path: str) -> Path | None:
    """The absolute path; None if it is in an unknown home, or in a working directory that was removed."""
    path = os.path.expanduser(path)
    try:
        return None if path.startswith("~") else Path(os.path.abspath(path))
    except FileNotFoundError:
        return None


def home_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """The user's home: HOME, else that of the user's account; None if neither is an absolute path."""
    environ = os.environ if environ is None else environ
    path = environ.get("HOME", "")
    with contextlib.suppress(KeyError, ImportError):  # a user without an account, as in containers
        import pwd

        path = path if os.path.isabs(path) else pwd.getpwuid(os.getuid()).pw_dir
    return Path(path) if os.path.isabs(path) else None


def usable(*, executable: bool = False) -> Iterator[Place]:
    """Writable places, best first. Faults of skipped places are reported as they are skipped."""
    if home_folder() is None and not os.environ.get(VARIABLE, "").strip():
        say("cache_no_home", "HOME", "neither HOME nor this user's account gives a home")
    for place in places():
        finding = judged(place, executable)
        if finding.ok:
            yield place
        else:
            say(finding.code, place.path, f"{place.path} cannot be used: {finding.reason}")


def readable(*, executable: bool = False) -> list[Place]:
    """Readable places, best first, up to the first writable one.

    A configured folder that is writable is used alone; one that is not writable is read before the next places.
    """
    result = []
    for place in places():
        if place.trusted(executable=executable):
            result.append(place)
            if place.shared:
                owner = place.path.stat().st_uid
                say("cache_shared", place.path, f"{place.path} is read, and files of user {owner} are trusted")
        elif (refused := place.refused()) is not None:
            say(refused[0], place.path, f"{place.path} is not read: {refused[1]}")
        if place.path not in _failed and judged(place, executable).ok:
            break
    return result


def fails(place: Place) -> None:
    """Record that writing failed in a place that had passed its checks; later places are then read too."""
    _failed.add(place.path)


def best(*, executable: bool = False) -> Finding:
    """The place that would be written, or why the first cannot be. Reports and writes nothing."""
    answers = [judged(place, executable) for place in places()]
    good = next((answer for answer in answers if answer.ok), None)
    if good is not None:
        return good
    first, reasons = answers[0], dict.fromkeys(answer.reason for answer in answers)
    return lacking(first.subject, first.code, "; ".join(reasons), CODES[first.code][1])


def keeps(kind: str, *, executable: bool = False) -> Finding:
    """Whether entries of a kind are available: a place is writable, or one was filled before. Writes nothing."""
    finding = best(executable=executable)
    filled = (
        None
        if finding.ok
        else next(
            (place for place in places() if place.trusted(executable=executable) and os.path.isdir(place.path / kind)),
            None,
        )
    )
    if filled is None:
        return finding
    return found(str(filled.path), str(filled.path), f"{filled.path} was filled before; {finding.reason}")


def code_of(error: OSError) -> str | None:
    """The code of an error that makes a place useless; None for any other error."""
    return PLACE_ERRORS.get(error.errno or 0)


def judged(place: Place, executable: bool) -> Finding:
    """As `Place.judge`, also for a place whose file system fails."""
    try:
        return place.judge(executable=executable)
    except OSError as error:  # a stale mount
        code = code_of(error) or "cache_unwritable"
        return lacking(str(place.path), code, f"{place.path}: {error.strerror or error}", CODES[code][1])


def _temporary_folder(environ: Mapping[str, str]) -> Path:
    """The folder that `tempfile` takes from the environment, without a test write."""
    named = (environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP"))
    return Path(next((path for path in named if os.path.isabs(path)), "/tmp"))
