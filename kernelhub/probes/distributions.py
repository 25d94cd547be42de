"""Installed distributions, read from their metadata with size limits.

`importlib.metadata` reads whole files, and one broken distribution makes every query raise. Here each distribution is
read separately: a fault in one is a finding that names it, and the others are unaffected.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from kernelhub.probes.finding import Finding, lacking
from kernelhub.probes.reading import METADATA_BYTES, RECORD_BYTES, Unreadable, decoded, read_bytes

_END_OF_HEADERS = (b"\n\n", b"\n\r\n")
_METADATA_FILES = ("METADATA", "PKG-INFO", "")  # the last is an .egg-info that is itself the file
_LONGEST_WORD = 200  # characters of a name or version
_REINSTALL = "reinstall or remove that distribution"
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class Distribution:
    """One installed distribution.

    Attributes:
        key: its name in normal form, from the name of its folder; no file is read.
        files: the location of its metadata, as `importlib.metadata` found it.
    """

    key: str
    files: Any

    @property
    def name(self) -> str:
        """Its name by its metadata, else `key`."""
        name = self.header("name") or ""
        return name if 0 < len(name) <= _LONGEST_WORD else self.key

    @property
    def version(self) -> str | None:
        """Its version; None where metadata is absent, empty or unreadable."""
        version = self.header("version") or ""
        return version if 0 < len(version) <= _LONGEST_WORD else None

    @property
    def where(self) -> str:
        """The folder of its metadata, for people."""
        return str(getattr(self.files, "_path", self.key))

    def header(self, name: str) -> str | None:
        """The first header of that name; None without one, or where the metadata cannot be read."""
        try:
            return next(iter(self.headers().get(name.lower(), ())), None)
        except Unreadable:
            return None

    def headers(self) -> dict[str, list[str]]:
        """The headers of its metadata, by name in lower case; empty without any.

        Raises:
            Unreadable: they cannot be read within `METADATA_BYTES`.
        """
        for file in _METADATA_FILES:
            content = _content(self.files, file, METADATA_BYTES, _END_OF_HEADERS)
            if content is not None:
                return _headers(decoded(content))
        return {}

    def entry_points(self, group: str) -> Iterator[tuple[str, str] | Unreadable]:
        """Name and value of each entry point of a group, or what is wrong with it.

        Raises:
            Unreadable: its entry points cannot be read.
        """
        content = _content(self.files, "entry_points.txt", METADATA_BYTES)
        inside = False
        for line in decoded(content or b"").splitlines():
            line = line.strip()
            if line.startswith("["):
                inside = line == f"[{group}]"
            elif inside and line and not line.startswith(("#", ";")):
                name, equals, value = (part.strip() for part in line.partition("="))
                module = value.partition("[")[0].partition(":")[0].strip()
                if equals and name and _MODULE.fullmatch(module):
                    yield name, value
                else:
                    yield Unreadable("unreadable", f"{line[:80]!r} is not 'name = module' or 'name = module:attribute'")

    def provides(self, package: str) -> bool:
        """Whether its own file list contains a top-level package or module.

        Raises:
            Unreadable: the list cannot be read.
        """
        declared = _content(self.files, "top_level.txt", METADATA_BYTES)
        if declared is not None and declared.strip():
            return package in decoded(declared).split()
        record = self._record()
        name = re.escape(package.encode())
        return re.search(rb'(?m)^"?' + name + rb"(?:/|\.py|\.[^/,\n]{0,80}(?:so|pyd),)", record) is not None

    def record(self) -> str:
        """The installer's list of its files with their hashes; empty without one that can be read."""
        try:
            return decoded(self._record())
        except Unreadable:
            return ""

    def _record(self) -> bytes:
        return _content(self.files, "RECORD", RECORD_BYTES) or b""


@dataclass(frozen=True)
class EntryPoint:
    """An entry point of a group, with the distribution that declares it."""

    name: str
    value: str
    distribution: Distribution

    @property
    def module(self) -> str:
        """The module that it names."""
        return self.value.partition("[")[0].partition(":")[0].strip()


def installed(name: str | None = None) -> list[Distribution]:
    """All installed distributions, or those of one name; of two with one name, the first on the path.

    If a third-party finder raises, the distributions that it yielded before that are kept; `broken` names the finder.
    """
    return list(_found(name)[0].values())


def _found(name: str | None) -> tuple[dict[str, Distribution], list[Finding]]:
    """The distributions by name, and each finder that raised with its error."""
    said: dict[str, Any] = {} if name is None else {"name": name}
    context = metadata.DistributionFinder.Context(**said)
    found: dict[str, Distribution] = {}
    wrong = []
    for finder in sys.meta_path:
        find = getattr(finder, "find_distributions", None)
        try:
            for item in find(context) if find is not None else ():
                distribution = Distribution(_key(item), item)
                found.setdefault(distribution.key, distribution)
        except Exception as error:
            wrong.append(_raised(finder, error))
    return found, wrong


def _raised(finder: Any, error: Exception) -> Finding:
    kind = finder if isinstance(finder, type) else type(finder)
    name = f"{kind.__module__}.{kind.__qualname__}"
    reason = f"finder {name} of sys.meta_path raised {type(error).__name__}; its distributions are unknown"
    return lacking(
        name,
        "metadata_broken",
        reason,
        f"update or uninstall the package that installs {name}",
    )


def distribution(name: str) -> Distribution | None:
    """The distribution of that name."""
    return next(iter(installed(name)), None) if name else None


def version_of(name: str) -> str | None:
    """The installed version of a distribution; None if it is not installed, or its version is unknown."""
    found = distribution(name)
    return None if found is None else found.version


def distributions_of(package: str) -> list[Distribution]:
    """The distributions whose file lists contain a top-level package."""
    return [item for item in installed() if _provides(item, package)]


def entry_points(group: str) -> tuple[list[EntryPoint], list[Finding]]:
    """The entry points of a group by name, and what is wrong with those that cannot be read."""
    points, wrong = [], []
    for item in installed():
        try:
            for entry in item.entry_points(group):
                if isinstance(entry, Unreadable):
                    wrong.append(_broken(item, f"its entry point of {group} {entry}"))
                else:
                    points.append(EntryPoint(*entry, item))
        except Unreadable as error:
            wrong.append(_broken(item, f"its entry points are unknown: {error}"))
    return sorted(points, key=lambda point: point.name), wrong


def broken() -> list[Finding]:
    """Faults in the metadata of installed distributions and in their finders: ``metadata_broken``."""
    found, wrong = _found(None)
    return wrong + [finding for item in found.values() if (finding := _wrong_with(item)) is not None]


def _wrong_with(item: Distribution) -> Finding | None:
    try:
        headers = item.headers()
        lacks = [name for name in ("name", "version") if not headers.get(name)]
        if lacks:
            return _broken(item, f"its metadata has no {' and no '.join(lacks)}")
        for file in ("top_level.txt", "entry_points.txt"):
            (_content(item.files, file, METADATA_BYTES) or b"").decode()
    except Unreadable as error:
        return _broken(item, str(error))
    except UnicodeDecodeError:
        return _broken(item, f"its {file} is not UTF-8; its names outside of ASCII are unknown")
    return None


def _broken(item: Distribution, what: str) -> Finding:
    return lacking(item.key, "metadata_broken", f"distribution {item.key} ({item.where}): {what}", _REINSTALL)


def _provides(item: Distribution, package: str) -> bool:
    try:
        return item.provides(package)
    except Unreadable:
        return False


def _key(found: Any) -> str:
    """The normal form of a distribution's name, from the name of its folder where it has one."""
    path = getattr(found, "_path", None)
    stem = str(getattr(path, "name", "")).rpartition(".")[0].partition("-")[0] or str(found.metadata["Name"])
    return re.sub(r"[-_.]+", "-", stem).lower()


def _content(found: Any, file: str, most_bytes: int, until: tuple[bytes, ...] = ()) -> bytes | None:
    """The content of a file of a distribution's metadata; None if it does not exist.

    Raises:
        Unreadable: it exists, but cannot be read or exceeds the limit.
    """
    place: Any = getattr(found, "_path", None)
    try:
        if isinstance(place, Path):
            path = place / file if file else place
            return read_bytes(path, most_bytes, until) if path.exists() and not (not file and path.is_dir()) else None
        if hasattr(place, "joinpath"):  # in a zip file
            path = place.joinpath(file)
            if not path.is_file():
                return None
            with path.open("rb") as opened:
                content: bytes = opened.read(most_bytes + 1)
        else:
            content = (found.read_text(file) or "").encode() if file else b""
            if not content:
                return None
    except Unreadable:
        raise
    except Exception as error:  # third-party code reads what is not in a folder
        raise Unreadable("unreadable", f"{file or 'its metadata'}: {error!r}") from None
    ends = [at for mark in until if (at := content.find(mark)) >= 0]
    if not ends and len(content) > most_bytes:
        raise Unreadable("too_large", f"{file} is larger than the limit of {most_bytes >> 20} MB")
    return content[: min(ends)] if ends else content


def _headers(text: str) -> dict[str, list[str]]:
    """``Name: value`` lines up to the first empty one; a line that begins with a space continues the previous one."""
    found: dict[str, list[str]] = {}
    last: list[str] = []
    for line in text.splitlines():
        if not line.strip():
            break
        if line[0].isspace():
            if last:
                last[-1] += f"\n{line.strip()}"
            continue
        name, colon, value = line.partition(":")
        if colon:
            last = found.setdefault(name.strip().lower(), [])
            last.append(value.strip())
    return found
