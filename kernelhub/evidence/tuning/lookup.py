"""Measured times for selection: read from disk once per op, and validated once per problem class.

An entry is valid while every kernel in it is unchanged: same versions of its libraries, same record. A kernel that is
no longer installed is removed from the ranking; the others stay. Any other change makes the entry a miss, which the
logger ``kernelhub.evidence`` reports once and `kernelhub doctor` lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernelhub.dispatch.fingerprint import record_digest
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.problem_class import device_key, facets_of
from kernelhub.dispatch.tuned import Tuned
from kernelhub.errors import ConfigurationError
from kernelhub.evidence.quarantine import say
from kernelhub.evidence.store import Miss
from kernelhub.evidence.tuning import tables
from kernelhub.evidence.tuning.entry import TuningEntry, key_of
from kernelhub.evidence.tuning.tables import FORMAT, Plain
from kernelhub.probes.device import DeviceFacts

_Place = tuple[Path, Plain]  # the file of an entry, and the entry
_NOT_ASKED: Any = object()


def table_of(device: DeviceFacts, files: Sequence[str]) -> MeasuredTable:
    """The measurements of a device of this machine: the user's own, then table files, then shipped tables."""
    return MeasuredTable(device, files)


def table_from(document: Mapping[str, Any], device: DeviceFacts) -> GivenTable:
    """The measurements of another rank, as received."""
    return GivenTable(document, device)


class MeasuredTable:
    """Valid measurements of this machine or of a machine of the same kind."""

    def __init__(self, device: DeviceFacts, files: Sequence[str] = ()) -> None:
        self._device = device
        self._files = tuple(files)
        self._of_files: tuple[dict[str, dict[str, list[_Place]]], list[Miss]] | None = None
        self._raw: dict[str, dict[str, list[_Place]]] = {}
        self._found: dict[tuple[str, Any], Tuned | None] = {}

    def find(self, op: str, problem: Any) -> Tuned | None:
        """The valid measurement of a problem, or None."""
        if not self._of_op(op):
            return None
        where = op, problem  # listing the facets takes a microsecond, a lookup half of one
        found: Tuned | None = self._found.get(where, _NOT_ASKED)
        if found is _NOT_ASKED:
            entry = self._entry(op, key_of(facets_of(problem)), [])
            found = self._found[where] = None if entry is None else entry.tuned()
        return found

    def entries(self, misses: list[Miss] | None = None) -> Iterator[TuningEntry]:
        """All valid entries, for reports; reasons of invalid ones are added to `misses`."""
        _ = HUB.settings
        collected = [] if misses is None else misses
        of_files, broken = self._files_read()
        kept, damaged = tables.ops_stored(self._device)
        collected += [*damaged, *broken]
        ops = dict.fromkeys([*kept, *of_files])
        for op in ops:
            for key in self._of_op(op):
                entry = self._entry(op, key, collected)
                if entry is not None:
                    yield entry

    def plain(self) -> dict[str, Any]:
        """All valid entries, as plain values."""
        entries = sorted((entry.to_dict() for entry in self.entries()), key=repr)
        return {"format": FORMAT, "device": list(device_key(self._device)), "entries": entries} if entries else {}

    def _of_op(self, op: str) -> dict[str, list[_Place]]:
        if not self._raw and not tables.has_folder(self._device):
            for folder, differs in tables.other_standings(self._device):
                say(Miss(folder, f"was measured for {differs}"))
        of_op = self._raw.get(op)
        if of_op is None:
            of_op = self._raw[op] = self._read(op)
        return of_op

    def _read(self, op: str) -> dict[str, list[_Place]]:
        """The stored entries by problem class, the user's own first."""
        where, own = tables.stored(self._device, op)
        found: dict[str, list[_Place]] = {key: [(where, plain)] for key, plain in own.items()}
        for key, places in self._files_read()[0].get(op, {}).items():
            found.setdefault(key, []).extend(places)
        return found

    def _files_read(self) -> tuple[dict[str, dict[str, list[_Place]]], list[Miss]]:
        """Entries of all table files, by op and problem class, and the named files that are not valid here."""
        if self._of_files is None:
            found: dict[str, dict[str, list[_Place]]] = {}
            misses: list[Miss] = []
            named = tables.files_of(self._files)
            for path in (*named, *tables.shipped()):
                entries = tables.read_table(path, self._device)
                if isinstance(entries, Miss):
                    if path in named:  # shipped tables are for many devices
                        say(entries)
                        misses.append(entries)
                    continue
                for plain in entries:
                    problem = plain.get("problem")
                    if isinstance(problem, dict):
                        key = key_of(tuple(sorted(problem.items())))
                        found.setdefault(str(plain.get("op")), {}).setdefault(key, []).append((path, plain))
            self._of_files = found, misses
        return self._of_files

    def _entry(self, op: str, key: str, misses: list[Miss]) -> TuningEntry | None:
        """The first valid entry of a problem class."""
        for where, plain in self._of_op(op).get(key, ()):
            entry = judged(plain, op, key)
            if isinstance(entry, TuningEntry):
                return entry
            miss = Miss(where, entry)
            say(miss)
            misses.append(miss)
        return None


class GivenTable:
    """The table of a group's first rank, used unchanged, since every rank must read the same.

    Configurations, such as tiles, apply only on the same kind of device: another kind may not support them.
    """

    def __init__(self, document: Mapping[str, Any], device: DeviceFacts) -> None:
        self._document = dict(document)
        same = list(device_key(device)) == list(document.get("device", ()))
        self._found: dict[tuple[str, Any], Tuned] = {}
        entries = document["entries"] if document.get("format") == FORMAT else ()
        for entry in map(TuningEntry.from_dict, entries):
            tuned = entry.tuned()
            self._found[entry.op, entry.facets] = tuned if same else Tuned(tuned.kernels, tuned.because)

    def find(self, op: str, problem: Any) -> Tuned | None:
        """The measurement of a problem, or None."""
        return self._found.get((op, facets_of(problem)))

    def plain(self) -> dict[str, Any]:
        """The table as received."""
        return self._document


def judged(plain: Plain, op: str, key: str) -> TuningEntry | str:
    """The entry from plain values if it is valid here, or why it is not."""
    try:
        entry = TuningEntry.from_dict(plain)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return f"contains an invalid entry of {op}: {error}"
    if (entry.op, entry.key) != (op, key):
        return f"contains an entry of {op} under another key"
    contract = HUB.registry.contracts.get(op)
    if contract is None:
        return f"is about {op}, which is not an op of this version"
    if {name for name, _ in entry.facets} != set(contract.schema.facets) - {"device"}:
        return f"is about facets of {op} that differ from this version's"
    here = {kernel.name: kernel for kernel in HUB.registry.candidates(op).kernels}
    gone = set()
    for name in entry.ranking:
        then, kernel = entry.kernels[name], here.get(name)
        versions = {} if kernel is None else HUB.versions_of(kernel)
        if kernel is None or not set(then.versions) <= set(versions):
            gone.add(name)
        elif versions != dict(then.versions):
            return f"was measured with {name} of {_written(then.versions)}; it is of {_written(versions)} now"
        elif record_digest(kernel) != then.record:
            return f"was measured with another record of {name}"
    return entry.without(gone) or f"is about {', '.join(entry.ranking)}, none of which is installed"


def check_table(document: Any) -> None:
    """Refuse a document that has the format of a table and is not valid.

    Raises:
        ConfigurationError: names the fault.
    """
    if document.get("format") != FORMAT:  # a document of another format, which is passed on and not used
        return
    try:
        for plain in document["entries"]:
            TuningEntry.from_dict(plain)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"tuned: it is not a valid table: {error!r}") from None


def _written(versions: Mapping[str, str]) -> str:
    return " and ".join(f"{name} {version}" for name, version in sorted(versions.items()))
