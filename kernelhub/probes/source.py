"""The Python source of an installed package, found and read without importing anything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from kernelhub.probes.finding import Finding, lacking
from kernelhub.probes.package import spec_of

MOST_HOPS = 8  # re-exports that are followed


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
    for match in re.finditer(r"^\s*from\s+([.\w]+)\s+import\s+(\([^)]*\)|[^\n(]+)", text, re.MULTILINE):
        names = re.sub(r"#[^\n]*", "", match[2]).strip("()")
        for part in names.split(","):
            words = part.split()
            if words and words[-1] == name and len(words) in (1, 3):
                yield match[1], words[0]
