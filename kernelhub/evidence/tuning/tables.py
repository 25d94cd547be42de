"""Storage of measured entries: documents in the cache folder, one per op, and table files, which are only read.

A document or file is for one kind of device and one set of versions; `standing_of` names them. A document is in the
folder of its fingerprint (`kernelhub.runtime.caches`), beside those of other devices and versions. `export` makes a
table file for other machines of that kind.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from kernelhub.dispatch.fingerprint import own_version
from kernelhub.errors import ConfigurationError
from kernelhub.evidence.store import Miss
from kernelhub.evidence.tuning.entry import TuningEntry
from kernelhub.probes import document
from kernelhub.probes.device import DeviceFacts
from kernelhub.probes.document import DocumentError
from kernelhub.probes.torch_build import torch_build
from kernelhub.runtime.caches import manifest
from kernelhub.runtime.caches.fingerprint import Fingerprint, digest_of, version_of
from kernelhub.runtime.caches.inventory import entries, folders, is_folder
from kernelhub.runtime.caches.manifest import Flaw
from kernelhub.runtime.caches.root import readable
from kernelhub.runtime.caches.store import Store, replace

KIND = "tuned"
FORMAT = "kernelhub tuned, version 1"
Plain = dict[str, Any]
_TABLE = {"for": {str: str}, "sha256": str, "entries": [{str: Any}]}


def standing_of(device: DeviceFacts) -> Fingerprint:
    """The key of a measurement: the kind of device, and the versions that all kernels have in common."""
    build = torch_build()
    parts = {
        "device": device.name,
        "architecture": device.arch,
        "multiprocessors": str(device.num_sms),
        "cuda": str(build.cuda or build.hip or "none"),
        "version kernelhub": own_version(),
        "version torch": version_of("torch"),
        "version triton": version_of("triton"),
    }
    arch = re.sub(r"[^A-Za-z0-9_.+-]+", "_", device.arch)
    return Fingerprint(arch if device.type != "cpu" else f"cpu-{arch}", tuple(sorted(parts.items())))


def store_of(device: DeviceFacts) -> Store:
    """The documents of a device with these versions."""
    return Store(KIND, standing_of(device))


def stored(device: DeviceFacts, op: str) -> tuple[Path, dict[str, Plain]]:
    """The file of an op's entries, and the stored entries by problem class, not validated."""
    store = store_of(device)
    kept = store.read(op)
    found = kept.get("entries") if isinstance(kept, dict) else None
    return store.path(op), dict(found) if isinstance(found, dict) else {}


def keep(device: DeviceFacts, measured: Iterable[TuningEntry]) -> None:
    """Add entries to the stored ones, replacing those of the same problem class."""
    by_op: dict[str, dict[str, Plain]] = {}
    for entry in measured:
        by_op.setdefault(entry.op, {})[entry.key] = entry.to_dict()
    for op, new in by_op.items():
        store_of(device).update(op, functools.partial(_merged, new))


def ops_stored(device: DeviceFacts) -> tuple[list[str], list[Miss]]:
    """Ops with a document for this device and these versions, also in memory; and invalid documents."""
    store, ops, misses = store_of(device), [], []
    for op, kept in store.every():
        if isinstance(kept, Flaw):
            misses.append(Miss(store.path(op), kept.sentence.removeprefix(f"{store.path(op)} ")))
        else:
            ops.append(op)
    return ops, misses


def has_folder(device: DeviceFacts) -> bool:
    """Whether the disk has any document for this device and these versions."""
    standing = standing_of(device)
    return any(is_folder(place.path / KIND / standing.sm / standing.digest) for place in readable())


def other_standings(device: DeviceFacts) -> list[tuple[Path, str]]:
    """Folders with documents of this device for other versions, each with the difference."""
    standing, found = standing_of(device), []
    for place in readable():
        for folder in folders(place.path / KIND / standing.sm):
            one = next((path for path in entries(folder) if path.suffix == ".json"), None)
            if folder.name == standing.digest or one is None:
                continue
            content = manifest.read(one, place.tree())
            if not isinstance(content, Flaw) and content["parts"].get("device") == device.name:
                found.append((folder, standing.difference(content["parts"])))
    return found


def table_text(device: DeviceFacts, measured: Iterable[TuningEntry]) -> str:
    """A table file's text: one entry per line, in an order that depends only on the problem classes."""
    standing = standing_of(device)
    lines = sorted(json.dumps(entry.to_dict(), sort_keys=True, allow_nan=False) for entry in measured)
    head = {"format": FORMAT, "sm": standing.sm, "for": dict(standing.parts), "sha256": digest_of(FORMAT, *lines)}
    words = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    body = ",\n".join(f"  {line}" for line in lines)
    return "\n".join(["{", *words, ' "entries": [', *([body] if body else []), " ]", "}", ""])


def export(path: Path, device: DeviceFacts, measured: Iterable[TuningEntry]) -> None:
    """Write a table file atomically.

    Raises:
        ConfigurationError: the file is not writable.
    """
    try:
        replace(path, table_text(device, measured), mode=0o644)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror or error}; name a file that can be written") from None


def read_table(path: Path, device: DeviceFacts) -> list[Plain] | Miss:
    """The entries of a table file, not validated, or why none of them is valid on a device."""
    try:
        table = document.read(path)
    except OSError as error:
        return Miss(path, f"cannot be read: {error.strerror or error}")
    except DocumentError as error:
        return Miss(path, str(error))
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        said = document.shown(table.get("format") if isinstance(table, dict) else None)
        return Miss(path, f"has the format {said}, not {FORMAT!r}; `kernelhub tune --export` writes one")
    wrong = document.difference(table, _TABLE)
    if wrong:
        return Miss(path, f"is not as kernelhub writes it: {wrong}")
    rows: list[Plain] = table["entries"]
    lines = sorted(json.dumps(row, sort_keys=True) for row in rows)
    if table["sha256"] != digest_of(FORMAT, *lines):
        return Miss(path, "was changed after it was written, or is damaged")
    differs = standing_of(device).difference(table["for"])
    return Miss(path, f"was measured for {differs}") if differs else rows


def files_of(names: Iterable[str]) -> list[Path]:
    """Table files: the named ones, and all ``.json`` files of named folders, in order."""
    paths = [Path(os.path.expanduser(name)) for name in names]
    return [file for path in paths for file in (sorted(path.glob("*.json")) if os.path.isdir(path) else [path])]


def shipped() -> list[Path]:
    """The table files that ship with kernelhub."""
    folder = resources.files("kernelhub.evidence.tuning.shipped")
    return files_of([str(folder)])


def _merged(new: Mapping[str, Plain], kept: Any) -> Plain:
    before = kept.get("entries") if isinstance(kept, dict) else None
    return {"entries": {**(before if isinstance(before, dict) else {}), **new}}
