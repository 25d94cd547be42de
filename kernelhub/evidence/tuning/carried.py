"""Tables carried to another machine of the same kind: written from what is kept, and kept from what is read."""

from __future__ import annotations

from pathlib import Path

import torch

from kernelhub.dispatch.hub import HUB
from kernelhub.errors import ConfigurationError
from kernelhub.evidence.store import Miss
from kernelhub.evidence.tuning import tables
from kernelhub.evidence.tuning.entry import Entry, key_of
from kernelhub.evidence.tuning.lookup import MeasuredTable, judged
from kernelhub.evidence.verify import device_here
from kernelhub.probes.device import facts


def export_stored(path: str | Path, device: torch.device | str | None = None) -> int:
    """Write everything that is kept of a device here and holds as a table file; how many problem classes that is.

    Raises:
        ConfigurationError: no such device, or the file cannot be written.
    """
    _ = HUB.settings
    where = facts(device_here(device))
    entries = list(MeasuredTable(where).entries())
    tables.export(Path(path), where, entries)
    return len(entries)


def import_table(path: str | Path, device: torch.device | str | None = None) -> list[Entry]:
    """Keep what a table file says, as if it had been measured here.

    Raises:
        ConfigurationError: the file is of another kind of device or other versions, damaged, or holds an entry that
            does not hold here; nothing is kept then.
    """
    _ = HUB.settings
    where = facts(device_here(device))
    read = tables.read_table(Path(path), where)
    if isinstance(read, Miss):
        raise ConfigurationError(f"{read.path} {read.reason}; measure here with `kernelhub tune`")
    entries = []
    for plain in read:
        problem = plain.get("problem")
        key = key_of(tuple(sorted(problem.items()))) if isinstance(problem, dict) else ""
        entry = judged(plain, str(plain.get("op")), key)
        if isinstance(entry, str):
            raise ConfigurationError(f"{path} {entry}; measure here with `kernelhub tune`")
        entries.append(Entry.from_dict(plain))
    tables.keep(where, entries)
    HUB.forget_evidence()
    return entries
