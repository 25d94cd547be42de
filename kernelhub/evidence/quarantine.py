"""Kernels that gave a wrong result on this machine, and are therefore not chosen by themselves.

A kernel is quarantined as a whole, for its op on one device: its checks are samples, and a kernel that ignores a mask
in bfloat16 is not to be trusted with float16, where nobody looked. `kernelhub verify` that passes lifts it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kernelhub.dispatch.constraint import Rejection
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.evidence import store
from kernelhub.evidence.results import RIGHT, Check, Result
from kernelhub.evidence.standing import difference, key_of, made_for, name_of
from kernelhub.probes.device import DeviceFacts
from kernelhub.probes.document import difference as difference_of_form

log = logging.getLogger("kernelhub.evidence")

_CHECK = {"case": str, "code": str, "problem": str, "ratio": (None, float), "figures?": str, "tokens?": bool}
_SCHEMA = {"op": str, "kernel": str, "date": str, "left_out": int, "checks": [_CHECK]}


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
        (op, name): Rejection("quarantined", f"on {record.date[:10]} {record.result.reason}", remedy(op, name))
        for (op, name), record in kept.records.items()
        if record.result.failures
    }


@functools.cache
def say(miss: store.Miss) -> None:
    """Warn that a document does not count, once in a process."""
    log.warning("%s %s; it counts as not there", miss.path, miss.reason)


def remedy(op: str, kernel: str) -> str:
    """What gets a kernel out of quarantine, or runs it all the same."""
    return f"mend it, then `kernelhub verify {op} --backend {kernel}`; use(unsafe=True) with backend= runs it as it is"


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
        else:
            kept.records[kernel.op, kernel.name] = found
    return kept


def kept_of(kernel: Kernel, device: DeviceFacts) -> Record | None:
    """The stored result of one kernel, if one holds here."""
    shelf = made_for(device)
    document = store.read(shelf, name_of(kernel))
    if document is None:
        return None
    found = _record(store.documents(shelf).path(name_of(kernel)), document, key_of(kernel, device))
    return None if isinstance(found, store.Miss) else found


def keep(kernel: Kernel, device: DeviceFacts, result: Result, date: str) -> str:
    """Store a result; empty, or why it holds for this process only."""
    plain = result.to_dict()
    document: dict[str, Any] = {
        "op": kernel.op,
        "kernel": kernel.name,
        "key": key_of(kernel, device),
        "date": date,
        **{name: plain[name] for name in ("status", "code", "reason", "worst", "left_out", "seconds", "checks")},
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
    return Record(Result(document["op"], document["kernel"], checks, document["left_out"]), document["date"])
