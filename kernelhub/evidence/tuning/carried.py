"""Export of tables for another machine of the same kind, and their import."""

from __future__ import annotations

from pathlib import Path

import torch

from kernelhub.dispatch.hub import HUB
from kernelhub.errors import ConfigurationError
from kernelhub.evidence.store import Miss
from kernelhub.evidence.tuning import tables
from kernelhub.evidence.tuning.entry import TuningEntry, key_of
from kernelhub.evidence.tuning.lookup import MeasuredTable, judged
from kernelhub.evidence.verify import device_here
from kernelhub.probes.device import facts


def export_stored(path: str | Path, device: torch.device | str | None = None) -> int:
    """Write all valid entries of a device as a table file; returns the number of problem classes.

    Raises:
        ConfigurationError: no such device, or the file is not writable.
    """
    _ = HUB.settings
    where = facts(device_here(device))
    entries = list(MeasuredTable(where).entries())
    tables.export(Path(path), where, entries)
    return len(entries)


def import_table(path: str | Path, device: torch.device | str | None = None) -> list[TuningEntry]:
    """Store the entries of a table file as if they had been measured here.

    Raises:
        ConfigurationError: the file is for another kind of device or other versions, is damaged, or contains an entry
            that is not valid here; nothing is stored then.
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
        entries.append(TuningEntry.from_dict(plain))
    tables.keep(where, entries)
    HUB.forget_evidence()
    return entries
