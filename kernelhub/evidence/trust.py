"""The problem classes that each kernel was verified for on this machine, as the trust policy reads them.

A class is a problem without its device: every facet counts, so that only checked classes are covered. An entry is valid
while the device, the driver, the versions and the record are unchanged; else it is a miss with the reason.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.problem_class import Facets
from kernelhub.evidence.quarantine import say
from kernelhub.evidence.store import Miss
from kernelhub.evidence.validity import difference, key_of, made_for, name_of
from kernelhub.probes.device import DeviceFacts
from kernelhub.probes.document import SCALAR
from kernelhub.probes.document import difference as difference_of_form
from kernelhub.runtime.caches.manifest import Flaw
from kernelhub.runtime.caches.store import Documents, forget_memory, holds_any

KIND = "trust"

_CLASS = {"facets": {str: SCALAR}, "date": str, "calls": [str], "seconds": float}
_SCHEMA = {"op": str, "kernel": str, "key": {str: str}, "classes": [_CLASS]}
_MOST_CLASSES = 4096  # of one kernel: models have tens
_guard = threading.Lock()


@dataclass(frozen=True)
class Covered:
    """One problem class for which a kernel was right.

    Attributes:
        facets: facets of the problem, without the device, weights as in a checkpoint.
        date: date of the verification, ISO 8601 in UTC.
        calls: labels of the checked calls, with their sizes.
        seconds: time of the verification.
    """

    facets: Facets
    date: str
    calls: tuple[str, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "facets": dict(self.facets),
            "date": self.date,
            "calls": list(self.calls),
            "seconds": round(self.seconds, 3),
        }


def classes(device: DeviceFacts) -> Mapping[tuple[str, str], Collection[Facets]]:
    """The valid verified problem classes of a device, by (op, kernel); `Machine` reads them once."""
    misses: list[Miss] = []
    found = {key: frozenset(item.facets for item in items) for key, items in covered(device, misses).items()}
    for miss in misses:
        say(miss)
    return found


def covered(device: DeviceFacts, misses: list[Miss] | None = None) -> dict[tuple[str, str], tuple[Covered, ...]]:
    """All valid verifications of a device, by (op, kernel); invalid ones are added to `misses`."""
    collected = [] if misses is None else misses
    if not holds_any(KIND, device.arch):
        return {}
    kernels = {name_of(kernel): kernel for item in HUB.registry.backends.values() for kernel in item.kernels}
    found = {}
    shelf = _shelf(device)
    for name, document in shelf.every():
        path, kernel = shelf.path(name), kernels.get(name)
        if isinstance(document, Flaw):
            collected.append(Miss(path, f"is not valid here: {document.sentence.removeprefix(f'{path} ')}"))
        elif kernel is not None:  # of a plugin that is not installed, so it cannot be selected
            items = _read(document, kernel, device)
            if isinstance(items, str):
                collected.append(Miss(path, items))
            else:
                found[kernel.op, kernel.name] = items
    return found


def keep(kernel: Kernel, device: DeviceFacts, facets: Facets, calls: Sequence[str], seconds: float) -> str:
    """Store that a kernel was right for a problem class; returns why it is not on disk, or an empty text."""
    made = Covered(facets, datetime.now(timezone.utc).isoformat(timespec="seconds"), tuple(calls), seconds)

    def changed(document: Any) -> dict[str, Any]:
        known = _read(document, kernel, device) if document is not None else ()
        items = [] if isinstance(known, str) else [item for item in known if item.facets != facets]
        kept = [*items, made][-_MOST_CLASSES:]
        return _document(kernel, device, [item.to_dict() for item in kept])

    with _guard:
        shelf = _shelf(device)
        shelf.update(name_of(kernel), changed)
        return "" if shelf.path(name_of(kernel)).exists() else f"{shelf.path(name_of(kernel))} cannot be written"


def withdraw(kernel: Kernel, device: DeviceFacts) -> None:
    """Remove all verified classes of a kernel, which was found wrong."""
    with _guard:
        shelf = _shelf(device)
        if shelf.read(name_of(kernel)) is not None:
            shelf.write(name_of(kernel), _document(kernel, device, []))


def forget_unwritten() -> None:
    """Drop documents that could not be written."""
    forget_memory(KIND)


def _shelf(device: DeviceFacts) -> Documents:
    return Documents(KIND, made_for(device))


def _document(kernel: Kernel, device: DeviceFacts, items: list[dict[str, Any]]) -> dict[str, Any]:
    return {"op": kernel.op, "kernel": kernel.name, "key": key_of(kernel, device), "classes": items}


def _read(document: Any, kernel: Kernel, device: DeviceFacts) -> tuple[Covered, ...] | str:
    """The classes of a document, or why it is not valid here."""
    wrong = difference_of_form(document, _SCHEMA)
    if wrong:
        return f"is not as kernelhub writes it: {wrong}"
    if (document["op"], document["kernel"]) != (kernel.op, kernel.name):
        return "is about another kernel than its name says"
    other = difference(document["key"], key_of(kernel, device))
    if other:
        return f"is for another state: {other}"
    names = set(HUB.registry.contracts[kernel.op].schema.facets) - {"device"}
    return tuple(
        Covered(tuple(sorted(item["facets"].items())), item["date"], tuple(item["calls"]), float(item["seconds"]))
        for item in document["classes"]
        if set(item["facets"]) == names
    )
