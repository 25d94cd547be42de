"""Kernels that gave a wrong result on this machine, and are therefore not chosen by themselves.

A kernel is quarantined as a whole, for its op on one device: its checks are samples, and a kernel that ignores a mask
in bfloat16 is not to be trusted with float16, where nobody looked. `kernelhub verify` that passes lifts it.
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
from kernelhub.evidence.results import IN_SERVICE, RIGHT, Check, Result, is_of_serving
from kernelhub.evidence.validity import difference, key_of, made_for, name_of
from kernelhub.probes.device import DeviceFacts
from kernelhub.probes.document import difference as difference_of_form
from kernelhub.runtime.caches.lock import Holder, myself

log = logging.getLogger("kernelhub.evidence")

_CHECK = {"case": str, "code": str, "problem": str, "ratio": (None, float), "figures?": str, "tokens?": bool}
_HOLDER = {"host": str, "boot": str, "container": str, "pid": int, "started": str, "token": str, "command": str}
_RUNNING = {"at": float, "holder": _HOLDER}
_SCHEMA = {"op": str, "kernel": str, "date": str, "left_out": int, "checks": [_CHECK], "running?": _RUNNING}
_MOST_PID = 1 << 31
changing = threading.RLock()  # held while a result is read and written anew: kernels are verified by several threads
_LONGEST_S = 3600.0  # that a process elsewhere, of which nothing can be told, verifies one kernel


@dataclass(frozen=True)
class Record:
    """A stored result that holds here and now.

    Attributes:
        result: what was found.
        date: when, ISO 8601 in UTC.
    """

    result: Result
    date: str


@dataclass
class Kept:
    """What the store says of a device.

    Attributes:
        records: by (op, kernel).
        misses: documents that say nothing here, each with its reason.
    """

    records: dict[tuple[str, str], Record] = field(default_factory=dict)
    misses: list[store.Miss] = field(default_factory=list)


def quarantined(device: DeviceFacts) -> dict[tuple[str, str], Rejection]:
    """For each quarantined kernel of a device, by (op, kernel), what selection says; asked once by `Machine`."""
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
    """Warn that a document does not count, once in a process."""
    log.warning("%s %s; it counts as not there", miss.path, miss.reason)


def remedy(result: Result) -> str:
    """What gets a kernel out of quarantine, or runs it all the same."""
    forced = f"use(unsafe=True) with backend= runs {result.kernel} as it is"
    if any(check.code == IN_SERVICE for check in result.failures):  # what an audit found the very call takes back
        return f"mend it, then `kernelhub replay` the case in the folder audit of the cache; {forced}"
    commands = dict.fromkeys(
        f"`kernelhub verify {result.op} --backend {result.kernel}{f' {check.problem}' if is_of_serving(check) else ''}`"
        for check in result.failures
    )
    return f"mend it, then {' and '.join(commands)}; {forced}"


def all_kept(device: DeviceFacts, *, wrong_only: bool = False) -> Kept:
    """Every stored result of a device, or every bad one, and those that do not hold here with the reason."""
    kept = Kept()
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
        if kernel is None and wrong_only:  # of a plugin that is not installed now, so that nobody can choose it
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
    """The stored result of one kernel, if one holds here."""
    shelf = made_for(device)
    document = store.read(shelf, name_of(kernel))
    if document is None:
        return None
    found = _record(store.documents(shelf).path(name_of(kernel)), document, key_of(kernel, device))
    return None if isinstance(found, store.Miss) or not found.result.checks else found


@dataclass
class Note:
    """That a kernel is being verified, on disk.

    Attributes:
        ended: whether what came out took its place.
    """

    ended: bool = False


@contextlib.contextmanager
def begun(kernel: Kernel, device: DeviceFacts) -> Iterator[Note]:
    """Write down that a kernel is verified inside the block; if the process ends there, the kernel is quarantined.

    What was known of the kernel stands beside it, and stands again where the block ends without another result.
    """
    note = Note()
    running = {"at": time.time(), "holder": asdict(myself(uuid.uuid4().hex))}
    with changing:
        _write(kernel, device, *_known(kernel, device), {"status": "running", "running": running})
    try:
        yield note
    finally:
        if not note.ended:
            with changing:  # what another thread found of the kernel meanwhile stands
                _write(kernel, device, *_known(kernel, device))


def _known(kernel: Kernel, device: DeviceFacts) -> tuple[Result, str]:
    """What is known of a kernel, and since when."""
    kept = kept_of(kernel, device)
    return (Result(kernel.op, kernel.name), now()) if kept is None else (kept.result, kept.date)


def now() -> str:
    """The date of what is found now."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def keep(kernel: Kernel, device: DeviceFacts, result: Result, date: str) -> str:
    """Store a result; empty, or why it holds for this process only."""
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
        **more,
    }
    return store.write(made_for(device), name_of(kernel), document)


def _record(path: Any, document: Mapping[str, Any], key: Mapping[str, str]) -> Record | store.Miss:
    """What a document says, if it is about the kernel as it is now."""
    stored = document.get("key")
    if not isinstance(stored, dict):
        return store.Miss(path, "has no key")
    other = difference(stored, key)
    if other:
        return store.Miss(path, f"is about something else: {other}")
    wrong = difference_of_form(document, _SCHEMA)
    if wrong:
        return store.Miss(path, f"is not as kernelhub writes it: {wrong}")
    try:
        checks = tuple(Check.from_dict(item) for item in document["checks"])
    except ValueError as error:
        return store.Miss(path, f"is not as kernelhub writes it: {error}")
    if "running" in document:
        checks = (*checks, *_of_one_that_ended(document["running"]))
    return Record(Result(document["op"], document["kernel"], checks, document["left_out"]), document["date"])


def _of_one_that_ended(running: Mapping[str, Any]) -> tuple[Check, ...]:
    """The check of a kernel whose verification never ended, though its process has."""
    holder, at = Holder(**{name: running["holder"][name] for name in _HOLDER}), running["at"]
    if not 0 < holder.pid < _MOST_PID:
        return ()
    gone = holder.ended() is not None if holder.is_here() else abs(time.time() - at) > _LONGEST_S
    if not gone:
        return ()
    figures = f"{holder} ended while it verified the kernel"
    return (Check("its verification", "crashed", "", math.inf, figures),)
