"""Quarantine of kernels that gave a wrong result on this machine: selection does not choose them automatically.

A kernel is quarantined as a whole, for its op on one device: its checks are samples, and a kernel that ignores a mask
in bfloat16 is not trusted with float16, which was not checked. A passing `kernelhub verify` lifts the quarantine.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from types import MappingProxyType
from typing import Any

from kernelhub.dispatch.constraint import Rejection
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.evidence import store
from kernelhub.evidence.results import EVERY, IN_SERVICE, RIGHT, Check, Result, is_of_serving
from kernelhub.evidence.validity import difference, key_of, made_for, name_of
from kernelhub.probes.device import DeviceFacts
from kernelhub.probes.document import difference as difference_of_form
from kernelhub.runtime.caches.lock import Holder, myself

log = logging.getLogger("kernelhub.evidence")

_CHECK = {"case": str, "code": str, "problem": str, "ratio": (None, float), "figures?": str, "tokens?": bool}
_HOLDER = {"host": str, "boot": str, "container": str, "pid": int, "started": str, "token": str, "command": str}
_RUNNING = {"at": float, "holder": _HOLDER}
_SCHEMA = {"op": str, "kernel": str, "date": str, "left_out": int, "checks": [_CHECK], "running?": _RUNNING}
_SCHEMA |= {"covers?": [str]}  # without it, of an older release: every problem
_MOST_PID = 1 << 31
_INTERRUPTED = "its verification"  # the case of a verification whose process ended
changing = threading.RLock()  # held while a result is read and rewritten: several threads verify kernels
_LONGEST_S = 3600.0  # longest verification of one kernel by a process elsewhere, whose state is unknown


@dataclass(frozen=True)
class Record:
    """A stored result that is valid now on this machine.

    Attributes:
        result: the result.
        date: its date, ISO 8601 in UTC.
    """

    result: Result
    date: str


@dataclass
class StoredResults:
    """The stored results of a device.

    Attributes:
        records: results by (op, kernel).
        misses: documents that are not valid here, each with its reason.
    """

    records: dict[tuple[str, str], Record] = field(default_factory=dict)
    misses: list[store.Miss] = field(default_factory=list)


def quarantined(device: DeviceFacts) -> dict[tuple[str, str], Rejection]:
    """The rejection of each quarantined kernel of a device, by (op, kernel); `Machine` reads it once."""
    kept = all_kept(device, wrong_only=True)
    for miss in kept.misses:
        say(miss)
    return {
        (op, name): Rejection("quarantined", f"on {record.date[:10]} {record.result.reason}", remedy(record.result))
        for (op, name), record in kept.records.items()
        if record.result.failures
    }


@functools.cache
def say(miss: store.Miss) -> None:
    """Warn that a document is ignored, once per process."""
    log.warning("%s %s; it is ignored", miss.path, miss.reason)


def remedy(result: Result) -> str:
    """How to lift the quarantine of a kernel, or run it regardless."""
    forced = f"use(unsafe=True) with backend= runs {result.kernel} regardless"
    if any(check.code == IN_SERVICE for check in result.failures):  # only a replay of the call lifts an audit's result
        return f"fix it, then `kernelhub replay` the case in the folder audit of the cache; {forced}"
    commands = dict.fromkeys(
        f"`kernelhub verify {result.op} --backend {result.kernel}{f' {check.problem}' if is_of_serving(check) else ''}`"
        for check in result.failures
    )
    return f"fix it, then {' and '.join(commands)}; {forced}"


def all_kept(device: DeviceFacts, *, wrong_only: bool = False) -> StoredResults:
    """All stored results of a device, or only failures, and those that are not valid here with the reason."""
    kept = StoredResults()
    if store.is_empty(device.arch):
        return kept
    records = {(kernel.op, kernel.name): kernel for item in HUB.registry.backends.values() for kernel in item.kernels}
    for path, document in store.read_all(made_for(device)):
        if isinstance(document, store.Miss):
            kept.misses.append(document)
            continue
        if wrong_only and document.get("status") == RIGHT:
            continue
        kernel = records.get((str(document.get("op")), str(document.get("kernel"))))
        if kernel is None and wrong_only:  # of a plugin that is not installed, so it cannot be selected
            continue
        if kernel is None:
            kept.misses.append(store.Miss(path, "is about a kernel that is not registered"))
            continue
        found = _record(path, document, key_of(kernel, device))
        if isinstance(found, store.Miss):
            kept.misses.append(found)
        elif found.result.checks:
            kept.records[kernel.op, kernel.name] = found
    return kept


def kept_of(kernel: Kernel, device: DeviceFacts) -> Record | None:
    """The stored result of one kernel, if it is valid here."""
    shelf = made_for(device)
    document = store.read(shelf, name_of(kernel))
    if document is None:
        return None
    found = _record(store.documents(shelf).path(name_of(kernel)), document, key_of(kernel, device))
    return None if isinstance(found, store.Miss) or not found.result.checks else found


@dataclass
class Note:
    """A note on disk that a kernel is being verified.

    Attributes:
        ended: whether a result has replaced the note.
    """

    ended: bool = False


@contextlib.contextmanager
def begun(kernel: Kernel, device: DeviceFacts) -> Iterator[Note]:
    """Store a note that a kernel is verified within the block; if the process ends there, the kernel is quarantined.

    Earlier results stay in the note, and are restored if the block ends without a new result.
    """
    note = Note()
    running = {"at": time.time(), "holder": asdict(myself(uuid.uuid4().hex))}
    with changing:
        _write(kernel, device, *_known(kernel, device), {"status": "running", "running": running})
    try:
        yield note
    finally:
        if not note.ended:
            with changing:  # keep results that another thread stored in the meantime
                _write(kernel, device, *_known(kernel, device))


def _known(kernel: Kernel, device: DeviceFacts) -> tuple[Result, str]:
    """The stored result of a kernel, and its date."""
    kept = kept_of(kernel, device)
    return (Result(kernel.op, kernel.name), now()) if kept is None else (kept.result, kept.date)


def now() -> str:
    """The date of a new result."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def keep(kernel: Kernel, device: DeviceFacts, result: Result, date: str) -> str:
    """Store a result; returns why it is valid in this process only, or an empty text."""
    return _write(kernel, device, result, date)


def _write(
    kernel: Kernel, device: DeviceFacts, result: Result, date: str, more: Mapping[str, Any] = MappingProxyType({})
) -> str:
    plain = result.to_dict()
    document: dict[str, Any] = {
        "op": kernel.op,
        "kernel": kernel.name,
        "key": key_of(kernel, device),
        "date": date,
        **{name: plain[name] for name in ("status", "code", "reason", "worst", "left_out", "seconds", "checks")},
        "covers": list(result.covers),
        **more,
    }
    return store.write(made_for(device), name_of(kernel), document)


def _record(path: Any, document: Mapping[str, Any], key: Mapping[str, str]) -> Record | store.Miss:
    """The result of a document, if it concerns the kernel in its current state."""
    stored = document.get("key")
    if not isinstance(stored, dict):
        return store.Miss(path, "has no key")
    other = difference(stored, key)
    if other:
        return store.Miss(path, f"is for another state: {other}")
    wrong = difference_of_form(document, _SCHEMA)
    if wrong:
        return store.Miss(path, f"is not as kernelhub writes it: {wrong}")
    try:
        checks = tuple(Check.from_dict(item) for item in document["checks"])
    except ValueError as error:
        return store.Miss(path, f"is not as kernelhub writes it: {error}")
    if "running" in document:
        checks = (*checks, *_of_one_that_ended(document["running"]))
    covers = tuple(document.get("covers", (EVERY,)))
    result = Result(document["op"], document["kernel"], checks, document["left_out"], covers=covers)
    return Record(result, document["date"])


def _of_one_that_ended(running: Mapping[str, Any]) -> tuple[Check, ...]:
    """The failed check of a kernel whose verification did not end although its process did."""
    holder, at = Holder(**{name: running["holder"][name] for name in _HOLDER}), running["at"]
    if not 0 < holder.pid < _MOST_PID:
        return ()
    gone = holder.ended() is not None if holder.is_here() else abs(time.time() - at) > _LONGEST_S
    if not gone:
        return ()
    figures = f"{holder} ended while it verified the kernel"
    return (Check(_INTERRUPTED, "crashed", "", math.inf, figures),)


def was_interrupted(result: Result) -> bool:
    """Whether a result says no more than that a process ended while it verified the kernel.

    The kernel may have ended the process, or a user or a scheduler: that needs another verification, in a child.
    """
    return bool(result.failures) and all(check.case == _INTERRUPTED for check in result.failures)
