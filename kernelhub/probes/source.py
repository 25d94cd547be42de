"""The Python source of an installed package and the names it defines, read without any import.

Unlike `probes.signature`, `symbol` finds classes and values too, and a submodule counts as a name of its package. A
name that is defined under a condition counts as defined; check that condition separately.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from kernelhub.probes.finding import Finding, found, lacking
from kernelhub.probes.package import spec_of
from kernelhub.probes.reading import Unreadable, read_source

MOST_HOPS = 8  # re-exports that are followed
_MOST_FILES = 64  # read for one query
_MOST_NAMES = 500  # looked up for one query
_ANNOTATION = r":(?:[^=\n]|\n[ \t\])])+"  # its lines after the first are indented, or close a bracket
_IMPORT = re.compile(r"^[ \t]*from[ \t]+([.\w]+)[ \t]+import[ \t]+(\(|[^\n(]+)", re.MULTILINE)


class Sources:
    """The files read for one query about a package: each once, and a limited number."""

    def __init__(self) -> None:
        self._texts: dict[Path, str] = {}
        self._asked: set[tuple[str, ...]] = set()
        self._count = 0

    def text(self, path: Path) -> str:
        """The source of a module.

        Raises:
            Unreadable: it is not a regular file, is too long, or exceeds the number of files.
        """
        text = self._texts.get(path)
        if text is None:
            if len(self._texts) == _MOST_FILES:
                raise Unreadable("too_large", f"{path} exceeds the limit of {_MOST_FILES} files per query")
            text = self._texts[path] = read_source(path)
        return text

    def first(self, *question: str) -> bool:
        """Whether a module and name are new to this query, so that circular imports end.

        Raises:
            Unreadable: the query exceeds the number of names.
        """
        self._count += 1
        if self._count > _MOST_NAMES:
            raise Unreadable("too_large", f"following its imports exceeds the limit of {_MOST_NAMES} names")
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
    """Modules that the name is imported from, and its name there."""
    at = 0
    while (match := _IMPORT.search(text, at)) is not None:
        at, names = match.end(), match[2]
        if names == "(":
            at = text.find(")", match.end()) + 1
            if not at:  # no closing parenthesis follows
                return
            names = text[match.end() : at - 1]
        for part in re.sub(r"#[^\n]*", "", names).split(","):
            words = part.split()
            if words and words[-1] == name and len(words) in (1, 3):
                yield match[1], words[0]


def defines(target: str, *, root: Path | None = None, remedy: str = "") -> Finding:
    """Check whether a module defines a name.

    Args:
        target: ``"package.module:name"``, ``"package.module:Class.member"``, or ``"package.module"`` for the module
            itself.
        root: folder of the top-level package, if not the one that an import would find.
        remedy: what the user can do if it does not.

    Returns:
        Finding. Codes of a negative finding: ``package_missing``, ``package_broken``, ``symbol_missing``.
    """
    module, _, name = target.partition(":")
    top, *rest = module.split(".")
    if root is None:
        root_or_finding = root_of(top, target, remedy)
        if isinstance(root_or_finding, Finding):
            return root_or_finding
        root = root_or_finding
    try:
        there = file_of(root, rest) is not None and (not name or _defined(Sources(), root, rest, name, MOST_HOPS))
    except (OSError, ValueError, RecursionError) as error:
        return lacking(target, "package_broken", f"the source of {module} cannot be read: {error}", remedy)
    if not there:
        what = f"{module} does not define {name}" if name else f"{top} has no module {module}"
        return lacking(target, "symbol_missing", what, remedy)
    return found(target, None, f"{module} defines {name}" if name else f"{top} has {module}")


def _defined(sources: Sources, root: Path, rest: list[str], name: str, hops: int) -> bool:
    """Whether the module `rest` of a package defines the name, or imports it from where it is defined."""
    source = file_of(root, rest) if hops and sources.first(*rest, name, str(hops)) else None
    if source is None:
        return False
    text = sources.text(source)
    name, _, member = name.partition(".")
    word = re.escape(name)
    here = rf"^(?:(?:async )?def {word}\b|class {word}\b|{word}[ \t]*(?:{_ANNOTATION})?=[^=])"
    definition = re.search(here, text, re.MULTILINE)
    if definition is not None:
        return not member or _has_member(text[definition.end() :], member)
    for wanted in (name, "*"):
        for module, original in imports(text, wanted):
            below = submodule(root, rest, source, module)
            if below is None:
                if wanted == "*":
                    continue
                return True  # imported from another package, which is not checked here
            original = name if wanted == "*" else original
            whole = f"{original}.{member}" if member else original
            if _defined(sources, root, below, whole, hops - 1) or file_of(root, [*below, whole]) is not None:
                return True
    return not member and source.name == "__init__.py" and file_of(root, [*rest, name]) is not None


def _has_member(body: str, member: str) -> bool:
    """Whether a class, whose source begins after its name, has a method, field or value of that name."""
    end = re.search(r"^[^\s#)\]]", body.partition("\n")[2], re.MULTILINE)
    inside = body.partition("\n")[2][: end.start() if end else None]
    return re.search(rf"^[ \t]+(?:(?:async )?def )?{re.escape(member)}[ \t]*[:=(]", inside, re.MULTILINE) is not None
