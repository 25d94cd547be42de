"""Loading and binding: one thread at a time for each kernel and each problem, while everything else goes on.

`HUB.lock` protects tables and is held for no longer than it takes to read or write one. What takes time (imports,
compilers, libraries) is done under a lock of its own, by these rules:

- A thread that loads nothing waits for the one that loads what it asks for, and finds it made.
- A thread inside a load never waits: it makes itself what it needs. So no circle of threads can wait for each other,
  also where a kernel's load calls another op, or the same one. The thread that imports a module for a load counts as
  part of that load.
- No wait is longer than its time limit; after it the thread makes what it asks for itself.
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
    2  # a signal handler may ask once more for what its thread is loading; a load that asks for itself does not end
)


class _Alone:
    """A block in which no other thread makes a thing; see `Making.alone`. A class, since every miss enters one."""

    __slots__ = ("_held", "_lock", "_making", "_outer", "_thing", "_timeout_s")

    def __init__(self, making: Making, thing: tuple[Hashable, ...], timeout_s: float) -> None:
        self._making, self._thing, self._timeout_s = making, thing, timeout_s

    def __enter__(self) -> None:
        making, thing, outer = self._making, self._thing, _inside.get()
        if outer and outer.count(thing) >= _NESTED:
            raise _endless(thing)
        lock = making.locks.get(thing)
        if lock is None:
            lock = making.locks.setdefault(thing, threading.Lock())  # one step: no other thread comes between
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
        f"{words} is being loaded, and its load calls what it is loaded for; fix the backend: a load calls no op that "
        "may choose the kernel it loads"
    )


class Making:
    """The locks of what is being made now.

    Args:
        busy: tells whether this thread holds a lock that those who make things need, so that it must not wait.
    """

    def __init__(self, busy: Callable[[], bool]) -> None:
        self.busy = busy
        self.forget()

    def forget(self) -> None:
        """Drop every lock: after a fork the threads that held them are not here."""
        self.locks: dict[Hashable, threading.Lock] = {}  # one for each kernel that was loaded, and stays

    def alone(self, *thing: Hashable, timeout_s: float) -> _Alone:
        """A block that makes a thing while no other thread makes it, by the rules of this module.

        Raises:
            KernelUnavailable: on entry, if making it asks for itself without end.
        """
        return _Alone(self, thing, timeout_s)


_REGISTRY = ("registry",)


@contextlib.contextmanager
def loading_registry() -> Iterator[None]:
    """The first load, or a reload, of ops and backends; the caller holds the lock of the tables.

    Raises:
        KernelhubError: it is asked for from inside itself, by a backend's import or a signal handler.
    """
    if _REGISTRY in _inside.get():
        raise KernelhubError(
            "kernelhub is still loading its ops and backends, and this call comes from inside of that: from a "
            "backend's import, a signal handler or a logging handler; call kernelhub once that is done, or load it "
            "early with kernelhub.reload()"
        )
    token = _inside.set((*_inside.get(), _REGISTRY))
    try:
        yield
    finally:
        _inside.reset(token)


def check_not_importing() -> None:
    """Refuse a choice from inside an import of what makes choices, or of a search for a module.

    Only code that interrupts this thread, such as a signal handler, comes from there. What it would load, in a thread
    of its own, could wait for that very import until its time limit.

    Raises:
        KernelhubError: naming what this thread is importing.
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
    """Whether a stack is inside of importlib's search for a module, during which no other thread can import."""
    while frame is not None:
        if frame.f_code.co_name == "_find_spec" and frame.f_globals.get("__name__") == "importlib._bootstrap":
            return True
        frame = frame.f_back
    return False


def _from_inside(what: str) -> KernelhubError:
    return KernelhubError(
        f"this call of kernelhub comes from inside of {what}, in the same thread: from a signal handler, a logging "
        "handler or a finaliser; call kernelhub once that is done, or load it early with kernelhub.reload()"
    )


def drop_half_imported() -> None:
    """After a fork: forget the modules that threads which are not here were importing, so that they are imported anew.

    CPython keeps the lock of such a module with its dead thread, and an import in the child would wait for it without
    end. Only what kernelhub was importing is dropped: its own modules, and all that the same threads were at.
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
    """Have `renew` called in every child that is forked from now on."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)
