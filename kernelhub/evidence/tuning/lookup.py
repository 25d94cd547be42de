"""What selection is told of measured times: read from disk once for each op, judged once for each problem class.

An entry holds while every kernel in it is as it was measured: same versions of its libraries, same record. A kernel
that is not here any more leaves the ranking and changes nothing for the rest. Anything else makes the entry a miss,
which the logger ``kernelhub.evidence`` says once and `kernelhub doctor` lists.
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
from kernelhub.evidence.tuning.entry import Entry, key_of
from kernelhub.evidence.tuning.tables import FORMAT, Plain
from kernelhub.probes.device import DeviceFacts

_Place = tuple[Path, Plain]  # an entry, and where it stands
_NOT_ASKED: Any = object()


def table_of(device: DeviceFacts, files: Sequence[str]) -> MeasuredTable:
    """The measurements of a device that is here: the user's own, then table files, then those that are shipped."""
    return MeasuredTable(device, files)


def table_from(document: Mapping[str, Any], device: DeviceFacts) -> GivenTable:
    """What another rank measured, as it sent it."""
    return GivenTable(document, device)


class MeasuredTable:
    """What was measured, here or on a machine of the same kind, and holds."""

    def __init__(self, device: DeviceFacts, files: Sequence[str] = ()) -> None:
        self._device = device
        self._files = tuple(files)
        self._of_files: tuple[dict[str, dict[str, list[_Place]]], list[Miss]] | None = None
        self._raw: dict[str, dict[str, list[_Place]]] = {}
        self._found: dict[tuple[str, Any], Tuned | None] = {}

    def find(self, op: str, problem: Any) -> Tuned | None:
        """What was measured for a problem, if that holds."""
        if not self._of_op(op):
            return None
        where = op, problem  # to tell its facets takes a microsecond, and to look one up half of one
        found: Tuned | None = self._found.get(where, _NOT_ASKED)
        if found is _NOT_ASKED:
            entry = self._entry(op, key_of(facets_of(problem)), [])
            found = self._found[where] = None if entry is None else entry.tuned()
        return found

    def entries(self, misses: list[Miss] | None = None) -> Iterator[Entry]:
        """Every entry that holds, for reports; why others do not is added to `misses`."""
        _ = HUB.settings
        told = [] if misses is None else misses
        of_files, broken = self._files_read()
        kept, damaged = tables.ops_stored(self._device)
        told += [*damaged, *broken]
        ops = dict.fromkeys([*kept, *of_files])
        for op in ops:
            for key in self._of_op(op):
                entry = self._entry(op, key, told)
                if entry is not None:
                    yield entry

    def plain(self) -> dict[str, Any]:
        """All that holds, as plain values."""
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
        """By problem class what stands on disk, the user's own first."""
        where, own = tables.stored(self._device, op)
        found: dict[str, list[_Place]] = {key: [(where, plain)] for key, plain in own.items()}
        for key, places in self._files_read()[0].get(op, {}).items():
            found.setdefault(key, []).extend(places)
        return found

    def _files_read(self) -> tuple[dict[str, dict[str, list[_Place]]], list[Miss]]:
        """Entries of all table files, by op and problem class, and the named files that say nothing here."""
        if self._of_files is None:
            found: dict[str, dict[str, list[_Place]]] = {}
            misses: list[Miss] = []
            named = tables.files_of(self._files)
            for path in (*named, *tables.shipped()):
                entries = tables.read_table(path, self._device)
                if isinstance(entries, Miss):
                    if path in named:  # those that are shipped are for many devices
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

    def _entry(self, op: str, key: str, misses: list[Miss]) -> Entry | None:
        """The first that holds of those of a problem class."""
        for where, plain in self._of_op(op).get(key, ()):
            entry = judged(plain, op, key)
            if isinstance(entry, Entry):
                return entry
            miss = Miss(where, entry)
            say(miss)
            misses.append(miss)
        return None


class GivenTable:
    """What the first rank of a group sent: it stands as it was sent, since every rank has to read the same of it.

    Configurations, such as tiles, are taken on the same kind of device only: another one may not be able to run them.
    """

    def __init__(self, document: Mapping[str, Any], device: DeviceFacts) -> None:
        self._document = dict(document)
        same = list(device_key(device)) == list(document.get("device", ()))
        self._found: dict[tuple[str, Any], Tuned] = {}
        entries = document["entries"] if document.get("format") == FORMAT else ()
        for entry in map(Entry.from_dict, entries):
            tuned = entry.tuned()
            self._found[entry.op, entry.facets] = tuned if same else Tuned(tuned.kernels, tuned.because)

    def find(self, op: str, problem: Any) -> Tuned | None:
        """What was measured for a problem."""
        return self._found.get((op, facets_of(problem)))

    def plain(self) -> dict[str, Any]:
        """The table as it was sent."""
        return self._document


def judged(plain: Plain, op: str, key: str) -> Entry | str:
    """The entry that plain values are, if it holds here, or why it does not."""
    try:
        entry = Entry.from_dict(plain)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return f"holds an entry of {op} that is not as kernelhub writes it: {error}"
    if (entry.op, entry.key) != (op, key):
        return f"holds an entry of {op} in another's place"
    contract = HUB.registry.contracts.get(op)
    if contract is None:
        return f"is about {op}, which is no op of this version"
    if {name for name, _ in entry.facets} != set(contract.schema.facets) - {"device"}:
        return f"is about other facets of {op} than this version has"
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
    return entry.without(gone) or f"is about {', '.join(entry.ranking)}, none of which is here"


def check_table(document: Any) -> None:
    """Refuse a document that says it is a table and is not as kernelhub writes it.

    Raises:
        ConfigurationError: naming what is wrong.
    """
    if document.get("format") != FORMAT:  # another's document, which is carried and not heeded
        return
    try:
        for plain in document["entries"]:
            Entry.from_dict(plain)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"tuned: it is no table as kernelhub writes it: {error!r}") from None


def _written(versions: Mapping[str, str]) -> str:
    return " and ".join(f"{name} {version}" for name, version in sorted(versions.items()))
