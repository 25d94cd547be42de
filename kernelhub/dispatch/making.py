"""Locks for loading and binding, one for each kernel of an op, and checks against re-entry and forks.

`HUB.lock` protects tables and is held only while one is read or written. Slow work (imports, compilers, libraries) is
done under these locks, by three rules:

- A thread outside of any load waits for the thread that loads the same kernel, and uses its result.
- A thread inside a load never waits: it loads what it needs itself. So threads cannot deadlock, also if a kernel's
  load calls another op, or the same one. The thread that imports a module for a load counts as part of that load.
- Every wait has a time limit; after it the thread loads the kernel itself.
"""

from __future__ import annotations

import _imp
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any

from kernelhub.dispatch.load import IMPORTING
from kernelhub.errors import KernelhubError, KernelUnavailable

_inside: ContextVar[tuple[Hashable, ...]] = ContextVar("kernelhub loads", default=())
_OURS = tuple(f"kernelhub.{room}" for room in ("backends", "dispatch", "evidence", "ops", "probes", "runtime"))
_NESTED = (
    2  # a signal handler may request the kernel that its thread is loading; a load that requires itself does not end
)


class _Alone:
    """The context manager of `Making.alone`. A class and not a generator, since every table miss enters one."""

    __slots__ = ("_held", "_lock", "_making", "_outer", "_thing", "_timeout_s")

    def __init__(self, making: Making, thing: tuple[Hashable, ...], timeout_s: float) -> None:
        self._making, self._thing, self._timeout_s = making, thing, timeout_s

    def __enter__(self) -> None:
        making, thing, outer = self._making, self._thing, _inside.get()
        if outer and outer.count(thing) >= _NESTED:
            raise _endless(thing)
        lock = making.locks.get(thing)
        if lock is None:
            lock = making.locks.setdefault(thing, threading.Lock())  # atomic
        self._lock, self._outer = lock, outer
        self._held = lock.acquire(False) or (not outer and not making.busy() and lock.acquire(timeout=self._timeout_s))
        _inside.set((*outer, thing))

    def __exit__(self, *error: object) -> None:
        _inside.set(self._outer)
        if self._held:
            self._lock.release()


def _endless(thing: tuple[Hashable, ...]) -> KernelUnavailable:
    words = " ".join(part for part in thing if isinstance(part, str))
    return KernelUnavailable(
        f"the load of {words} calls an op that selects the same kernel again; fix the backend: a load must not call an "
        "op that may select the kernel being loaded"
    )


class Making:
    """The locks of loads.

    Args:
        busy: returns whether this thread holds a lock that loads need, so that it must not wait for one.
    """

    def __init__(self, busy: Callable[[], bool]) -> None:
        self.busy = busy
        self.forget()

    def forget(self) -> None:
        """Drop every lock: after a fork the threads that held them do not exist."""
        self.locks: dict[Hashable, threading.Lock] = {}  # one for each loaded kernel; never removed

    def alone(self, *thing: Hashable, timeout_s: float) -> _Alone:
        """A block in which no other thread loads the same thing, by the rules of this module.

        Raises:
            KernelUnavailable: on entry, if the load of the thing requires itself.
        """
        return _Alone(self, thing, timeout_s)


_REGISTRY = ("registry",)


@contextlib.contextmanager
def loading_registry() -> Iterator[None]:
    """A block that loads ops and backends; the caller takes the lock of the tables inside it.

    Raises:
        KernelhubError: this thread is already inside such a block: a backend's import or a signal handler calls
            kernelhub.
    """
    if _REGISTRY in _inside.get():
        raise KernelhubError(
            "kernelhub is still loading its ops and backends, and this call was made during that load: by a backend's "
            "import, a signal handler or a logging handler; call kernelhub after the load, or load it early with "
            "kernelhub.reload()"
        )
    token = _inside.set((*_inside.get(), _REGISTRY))
    try:
        yield
    finally:
        _inside.reset(token)


def check_not_importing() -> None:
    """Refuse a selection while this thread imports a module of kernelhub, or searches for any module.

    Only code that interrupts this thread, such as a signal handler, can call from there. Its load, in another thread,
    could wait for this import until the time limit.

    Raises:
        KernelhubError: the message names what this thread is importing.
    """
    if _imp.lock_held() and _searches(sys._getframe(1)):
        raise _from_inside("a search for a module")
    locks: dict[str, Any] = getattr(sys.modules.get("_frozen_importlib"), "_module_locks", {})
    if not locks:
        return
    here = threading.get_ident()
    for name, reference in list(locks.items()):
        if name.startswith(_OURS) and getattr(reference(), "owner", None) == here and not _inside.get():
            raise _from_inside(f"an import of {name}")


def _searches(frame: FrameType | None) -> bool:
    """Whether a stack is inside importlib's search for a module, during which no other thread can import."""
    while frame is not None:
        if frame.f_code.co_name == "_find_spec" and frame.f_globals.get("__name__") == "importlib._bootstrap":
            return True
        frame = frame.f_back
    return False


def _from_inside(what: str) -> KernelhubError:
    return KernelhubError(
        f"this call of kernelhub was made during {what}, in the same thread: by a signal handler, a logging handler "
        "or a finaliser; call kernelhub after it, or load it early with kernelhub.reload()"
    )


def drop_half_imported() -> None:
    """After a fork: drop the modules that the parent's other threads were importing, so that they are imported again.

    CPython keeps the lock of such a module with its dead thread, so that an import in the child would wait forever.
    Only modules of kernelhub, and those that the same threads were importing, are dropped.
    """
    machinery: Any = sys.modules.get("_frozen_importlib")
    locks: dict[str, Any] = getattr(machinery, "_module_locks", {})
    owners = {name: getattr(reference(), "owner", None) for name, reference in list(locks.items())}
    here = threading.get_ident()
    gone = {
        owner for name, owner in owners.items() if owner not in (None, here) and name.partition(".")[0] == "kernelhub"
    } | (IMPORTING - {here})
    for name, owner in owners.items():
        if owner in gone:
            locks.pop(name, None)
            sys.modules.pop(name, None)
    IMPORTING.intersection_update({here})


def at_fork(renew: Callable[[], None]) -> None:
    """Register `renew`, which is called in every child that is forked from now on."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)
