"""The Python source of an installed package, found and read without importing anything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from kernelhub.probes.finding import Finding, lacking
from kernelhub.probes.package import spec_of
from kernelhub.probes.reading import Unreadable, read_source

MOST_HOPS = 8  # re-exports that are followed
_MOST_FILES = 64  # read for one question
_MOST_NAMES = 500  # looked for, likewise
_IMPORT = re.compile(r"^[ \t]*from[ \t]+([.\w]+)[ \t]+import[ \t]+(\(|[^\n(]+)", re.MULTILINE)


class Sources:
    """The files that are read to answer one question about a package: each once, and not more than a few."""

    def __init__(self) -> None:
        self._texts: dict[Path, str] = {}
        self._asked: set[tuple[str, ...]] = set()
        self._count = 0

    def text(self, path: Path) -> str:
        """The source of a module.

        Raises:
            Unreadable: it is no regular file, too long, or one too many.
        """
        text = self._texts.get(path)
        if text is None:
            if len(self._texts) == _MOST_FILES:
                raise Unreadable("too_large", f"{path} is one more than the {_MOST_FILES} files that are looked into")
            text = self._texts[path] = read_source(path)
        return text

    def first(self, *question: str) -> bool:
        """Whether this is asked for the first time, so that modules that import all of each other end.

        Raises:
            Unreadable: it is one question too many.
        """
        self._count += 1
        if self._count > _MOST_NAMES:
            raise Unreadable("too_large", f"more than {_MOST_NAMES} imports lead on from it")
        new = question not in self._asked
        self._asked.add(question)
        return new


def root_of(top: str, subject: str, remedy: str) -> Path | Finding:
    """Folder of a top-level package, or its file if it is a single module."""
    spec = spec_of(top, subject=subject, remedy=remedy)
    if isinstance(spec, Finding):
        return spec
    if spec is None:
        return lacking(subject, "package_missing", f"{top} is not installed", remedy)
    for folder in spec.submodule_search_locations or ():
        return Path(folder)
    if spec.origin is None or not spec.origin.endswith(".py"):
        return lacking(subject, "symbol_unknown", f"{top} has no Python source to read", remedy)
    return Path(spec.origin)


def file_of(root: Path, rest: list[str]) -> Path | None:
    """Source of the submodule `rest` of the package in `root`."""
    if root.suffix == ".py":
        return None if rest else root
    base = root.joinpath(*rest)
    return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()), None)


def submodule(root: Path, rest: list[str], source: Path, module: str) -> list[str] | None:
    """The submodule of the same package that an import in `source` names, or None if it is of another."""
    package = rest if source.name == "__init__.py" else rest[:-1]
    level = len(module) - len(module.lstrip("."))
    if level:
        base = package[: len(package) - level + 1]
    elif module.split(".")[0] == root.stem:
        base, module = [], module.partition(".")[2]
    else:
        return None
    return [*base, *(part for part in module.lstrip(".").split(".") if part)]


def imports(text: str, name: str) -> Iterator[tuple[str, str]]:
    """Modules that the name is imported from, and what it is called there."""
    at = 0
    while (match := _IMPORT.search(text, at)) is not None:
        at, names = match.end(), match[2]
        if names == "(":
            at = text.find(")", match.end()) + 1
            if not at:  # no list of names ends after this
                return
            names = text[match.end() : at - 1]
        for part in re.sub(r"#[^\n]*", "", names).split(","):
            words = part.split()
            if words and words[-1] == name and len(words) in (1, 3):
                yield match[1], words[0]
