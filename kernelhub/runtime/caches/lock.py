"""A file lock that names its holder, ends with its holder, and works on NFS.

The file is created by link(2), which is atomic on every file system that supports it. On NFS, flock may be a no-op and
O_EXCL was not atomic. The file names the holder: host, boot, container, process and start time of the process. So a
dead holder on this machine is detected immediately, also if its process id was reused. A dead holder on another machine
is detected by age, since a holder touches its lock every few seconds. Ages are differences of two times of the file
system, so differing clocks do no harm.

Publish what a lock protects by an atomic rename: if a holder that counted as dead resumes, two processes make the same
entry, and either is valid.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import socket
import stat
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernelhub.errors import LockTimeout
from kernelhub.probes import document
from kernelhub.probes.document import DocumentError
from kernelhub.runtime.caches.notices import say
from kernelhub.runtime.caches.trusted import FILE_MODE, create

TOKEN = re.compile(r"[0-9a-f]{32}")  # it is used in a path
_MOST_BYTES = 1 << 16
_MOST_PID = 1 << 31
_WORDS = 255


@dataclass(frozen=True)
class Holder:
    """A process that holds a lock.

    Attributes:
        host: name of its machine.
        boot: identity of that machine's boot, empty where there is none.
        container: namespace of process ids; process ids are unique only within it.
        pid: process id there.
        started: start time of the process, in clock ticks since the boot; empty if unknown.
        token: unique to this hold of the lock.
        command: command line of the process, for display.
    """

    host: str
    boot: str
    container: str
    pid: int
    started: str
    token: str
    command: str

    @classmethod
    def read(cls, path: Path) -> Holder | None:
        """The holder that a lock file names; None if it names no valid process of ours, or does not exist."""
        try:
            fields = document.read(path, _FIELDS, _MOST_BYTES)
        except (OSError, DocumentError):
            return None
        if not TOKEN.fullmatch(fields["token"]) or not 0 < fields["pid"] < _MOST_PID:
            return None
        return cls(**{name: _printed(fields[name]) for name in _FIELDS})

    def to_text(self) -> str:
        """The contents of its lock file."""
        return json.dumps(asdict(self))

    def is_here(self) -> bool:
        """Whether its process id is valid in this process's namespace."""
        return (self.host, self.boot, self.container) == _here()

    def ended(self) -> str | None:
        """Why a holder that `is_here` has ended, as a code; None if it runs."""
        if not _runs(self.pid):
            return "lock_dead_holder"
        started = started_at(self.pid)
        return "lock_reused_pid" if started and started != self.started else None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} ({self.command})"


_FIELDS = {"host": str, "boot": str, "container": str, "pid": int, "started": str, "token": str, "command": str}


def myself(token: str) -> Holder:
    """This process."""
    command = shlex.join([os.path.basename(sys.executable or "python"), *sys.argv])[:120]
    return Holder(*_here(), os.getpid(), started_at(os.getpid()), token, command)


def started_at(pid: int) -> str:
    """Start time of a process, in clock ticks since the boot; empty if unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    return text.rpartition(b")")[2].split()[19].decode()  # after the command, which may contain any character


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    return True


def _printed(value: Any) -> Any:
    """Text that is safe in a log line: no line breaks and no terminal control characters."""
    if not isinstance(value, str):
        return value
    return "".join(letter if letter.isprintable() else "?" for letter in value[:_WORDS])


def _here() -> tuple[str, str, str]:
    boot = container = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        container = os.readlink("/proc/self/ns/pid")
    return socket.gethostname(), boot, container


STALE_AFTER_S = 120.0  # without a heartbeat of a holder elsewhere; NFS caches attributes for up to 60
_BEAT_S = 15.0
_UNREADABLE_AFTER_S = 10.0  # longest time that a file may be empty without link(2)
_BREAKER_S = 10.0  # longest time for removing a dead holder's lock
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5
_SAY_AFTER_S = 5.0
_AHEAD_S = 60.0  # a heartbeat further in the future is invalid, since the file system gave both times
_AT_ONCE = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)

OnWait = Callable[[str, float], None]


@dataclass(frozen=True)
class Held:
    """A lock that this thread holds.

    Attributes:
        token: unique to this hold of the lock.
        after: token of the dead holder that it was taken from, or None.
    """

    path: Path
    token: str
    after: str | None

    def still(self) -> bool:
        """Whether no other process has taken it over."""
        holder = Holder.read(self.path)
        return holder is not None and holder.token == self.token


@contextlib.contextmanager
def lock(
    path: Path, *, timeout_s: float, stale_after_s: float = STALE_AFTER_S, on_wait: OnWait | None = None
) -> Iterator[Held]:
    """Hold the lock `path` among threads, processes and machines.

    Args:
        path: the file, in an existing folder.
        timeout_s: longest wait.
        stale_after_s: time without a heartbeat after which a holder on another machine counts as dead.
        on_wait: called several times a second while waiting, with the holder as text and the seconds waited.

    Raises:
        LockTimeout: another process holds the lock; the message names it.
        OSError: the folder is not writable.
    """
    begun = time.monotonic()
    mine = _thread_lock(str(path))
    if not mine.acquire(timeout=max(timeout_s, 0.0)):
        raise LockTimeout(path, "another thread of this process", time.monotonic() - begun)
    try:
        held = _acquire(path, begun, timeout_s, stale_after_s, on_wait)
        ended = threading.Event()
        beat = threading.Thread(target=_beat, args=(held, ended), name=f"holds {path.name}", daemon=True)
        beat.start()
        process = os.getpid()
        try:
            yield held
        finally:
            if os.getpid() == process:  # a forked child does not hold the lock
                ended.set()
                beat.join()
                _release(held)
    finally:
        mine.release()


def _acquire(path: Path, begun: float, timeout_s: float, stale_after_s: float, on_wait: OnWait | None) -> Held:
    """Wait for the lock. A file of our own beside it is linked, and gives the file system's time."""
    me = myself(uuid.uuid4().hex)
    own = path.with_name(f".{path.name}-{me.token}")
    pause, after = _FIRST_PAUSE_S, None
    try:
        create(own, me.to_text().encode())
        while not _taken(own, path, me):
            os.utime(own)
            holder, age_s = Holder.read(path), _age_s(path, own)
            waited_s = time.monotonic() - begun
            words = f"{holder or 'an unnamed process'}, last seen {max(age_s or 0, 0):.0f} s ago"
            if age_s is None and waited_s < timeout_s:  # released in the meantime
                continue
            dead = _dead(path, holder, age_s or 0.0, stale_after_s)
            if dead is not None and _break(path, own, me, holder):
                say(dead[0], path, dead[1])
                after = holder.token if holder is not None else None
                continue
            if waited_s >= timeout_s:
                raise LockTimeout(path, words, waited_s)
            if dead is not None:
                continue
            if on_wait is not None:
                on_wait(words, waited_s)
            if waited_s > _SAY_AFTER_S:
                say("lock_wait", path, f"waiting for {path}, held by {words}, for at most {timeout_s:g} s")
            time.sleep(min(pause, max(timeout_s - waited_s, 0.001)))
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)
    finally:
        with contextlib.suppress(OSError):
            own.unlink()
    return Held(path, me.token, after)


def _taken(own: Path, path: Path, me: Holder) -> bool:
    """One attempt. NFS may lose the reply of link(2), so the number of links decides."""
    try:
        os.link(own, path)
        return True
    except FileExistsError:
        return own.stat().st_nlink == 2
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    try:  # no hard links here, as on some FUSE mounts
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, FILE_MODE)
    except FileExistsError:
        return False
    with open(descriptor, "w") as file:
        file.write(me.to_text())
    return True


def _dead(path: Path, holder: Holder | None, age_s: float, stale_after_s: float) -> tuple[str, str] | None:
    """Why the holder counts as dead, as code and sentence; None if it may be alive."""
    if not _is_file(path):
        return "lock_unreadable", f"{path} is not a regular file, so kernelhub did not create it"
    if age_s < -_AHEAD_S:
        who = holder or "an unnamed process"
        return "lock_expired", f"{path} is held by {who}, last seen {-age_s:.0f} s in the future"
    if holder is None:
        if age_s > _UNREADABLE_AFTER_S:
            return "lock_unreadable", f"{path} names no holder and is {age_s:.0f} s old"
        return None
    if holder.is_here():
        ended = holder.ended()
        return None if ended is None else (ended, f"{path} was held by {holder}, which has ended")
    if age_s > stale_after_s:
        return "lock_expired", f"{path} is held by {holder}, without a heartbeat for {age_s:.0f} s"
    return None


def _break(path: Path, own: Path, me: Holder, holder: Holder | None) -> bool:
    """Remove a dead holder's lock, and only that one. A second lock allows one process at a time to do so.

    Renaming the file and checking its holder afterwards would be wrong: if the lock belongs to the next holder by then,
    that holder could not find its lock to release it, and no process ever would.
    """
    breaker = path.with_name(f".{path.name}-breaker")
    if not _taken(own, breaker, me):
        age_s = _age_s(breaker, own)
        if age_s is not None and (age_s > _BREAKER_S or age_s < -_AHEAD_S or not _is_file(breaker)):
            _remove(breaker, me)  # its maker was killed within these lines
        time.sleep(_FIRST_PAUSE_S)
        return False
    try:
        right = Holder.read(path) == holder
        if right:
            _remove(path, me)
        return right
    finally:
        breaker.unlink(missing_ok=True)


def _remove(path: Path, me: Holder) -> None:
    """Remove a lock; a folder in its place is only renamed, with its contents."""
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(f".{path.name}.bad-{me.token}"))
    else:
        path.unlink(missing_ok=True)


def _release(held: Held) -> None:
    """Release the lock. The protected result is valid, so a folder that became unwritable is reported, not raised."""
    if not held.still():
        return
    try:
        held.path.unlink(missing_ok=True)
    except OSError as error:
        say("lock_left", held.path, f"{held.path} cannot be removed: {error.strerror or error}")


def _beat(held: Held, ended: threading.Event) -> None:
    """Send heartbeats until the lock is released or lost."""
    while not ended.wait(_BEAT_S):
        try:
            if not held.still():
                return
            os.utime(held.path)
        except OSError:  # a transient error of the file system; the next heartbeat may succeed
            continue


def _age_s(path: Path, own: Path) -> float | None:
    """Seconds since the holder's last heartbeat, by the file system's clock; None if the lock does not exist."""
    try:
        if not _is_file(path):
            return own.stat().st_mtime - path.lstat().st_mtime
        file = os.open(path, _AT_ONCE)  # NFS fetches fresh attributes when a file is opened
    except FileNotFoundError:
        return None
    try:
        return own.stat().st_mtime - os.fstat(file).st_mtime
    finally:
        os.close(file)


def _is_file(path: Path) -> bool:
    """Whether the path is a regular file or does not exist: not a link, pipe, socket, device or folder."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return True


_thread_locks: dict[str, threading.Lock] = {}
_thread_locks_guard = threading.Lock()


def _thread_lock(path: str) -> threading.Lock:
    with _thread_locks_guard:
        return _thread_locks.setdefault(path, threading.Lock())


def _renew() -> None:
    """After a fork: the threads that held these locks do not exist here, and their lock files are the parent's."""
    global _thread_locks_guard
    _thread_locks_guard = threading.Lock()
    _thread_locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
