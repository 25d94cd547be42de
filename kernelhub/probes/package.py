"""Whether a package is installed in a suitable version, by its metadata; the package is not imported."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

from kernelhub.probes.finding import Finding, found, lacking


@dataclass(frozen=True)
class Wanted:
    """A package to look for; arguments as of `package`."""

    name: str
    versions: str = ""
    distribution: str | None = None
    install: str = ""


def package(name: str, versions: str = "", *, distribution: str | None = None, install: str = "") -> Finding:
    """Look for the top-level package `name`.

    Args:
        name: import name; a submodule may not be given, since finding one imports its parent.
        versions: PEP 440 specifiers that the installed version must meet, e.g. ``">=3.6,<3.10"``.
        distribution: name on the package index, where it differs from the import name. A namespace that several
            distributions share, such as ``cuda``, is there if this one is.
        install: the remedy, a command; by default ``pip install`` of the distribution.

    Returns:
        Finding with the version as value. Codes of a negative finding: ``package_missing``,
        ``package_broken`` (a folder without code, or a loader that fails), ``package_version``
        (another version is needed, or the version is unknown).
    """
    if "." in name:
        raise ValueError(f"package() takes a top-level name, got {name!r}")
    distribution = distribution or name
    remedy = install or f'pip install "{distribution}{versions}"'
    spec = spec_of(name, remedy=remedy)
    if isinstance(spec, Finding):
        return spec
    if spec is None:
        return lacking(name, "package_missing", f"{name} is not installed", remedy)
    if spec.origin is None and (distribution == name or _version_of(distribution) is None):
        folder = ", ".join(spec.submodule_search_locations or ())
        return lacking(name, "package_broken", f"{name} is an empty namespace folder ({folder})", remedy)
    version = _version_of(distribution)
    if version is None:
        if not versions:
            return found(name, None, f"{name} of unknown version at {spec.origin}")
        return lacking(name, "package_version", f"the metadata of {name} has no version", remedy)
    if not fits(version, versions):
        return lacking(name, "package_version", f"{name} {version} is installed, {versions} is needed", remedy, version)
    return found(name, version, f"{name} {version}")


def spec_of(name: str, *, subject: str = "", remedy: str = "") -> ModuleSpec | Finding | None:
    """Where a top-level package would be imported from; None if there is none, a finding if the search fails."""
    try:
        return importlib.util.find_spec(name)
    except (Exception, SystemExit) as error:  # a foreign finder or a half-imported module may raise anything
        return lacking(subject or name, "package_broken", f"looking for {name} failed: {error!r}", remedy)


def folders(name: str) -> list[Path]:
    """The folders of a top-level package; none if it is not installed or the search fails."""
    spec = spec_of(name)
    if spec is None or isinstance(spec, Finding):
        return []
    return [Path(folder) for folder in spec.submodule_search_locations or ()]


def fits(version: str, versions: str) -> bool:
    """Whether a version meets PEP 440 specifiers. Pre-releases count."""
    from packaging.specifiers import SpecifierSet  # here, since it costs some milliseconds at import

    return version in SpecifierSet(versions, prereleases=True)


def _version_of(distribution: str) -> str | None:
    """Installed version, or None where metadata is absent, empty or unreadable."""
    from packaging.version import InvalidVersion, Version

    from kernelhub.probes.distributions import version_of

    version = version_of(distribution)
    try:
        Version(version or "")
    except InvalidVersion:
        return None
    return None if version is None or version.startswith("0.0.0+") else version


@dataclass(frozen=True)
class Library:
    """A compiled library of a package, which registers operators with torch when it is loaded.

    Attributes:
        package: import name of the package that contains it.
        namespace: the namespace of its operators in torch.
        install: the remedy if it is missing.
        files: globs of its file below the package's folder, in order of preference.
        files_on: the same for devices of one compute capability, if the package has several builds.
    """

    package: str
    namespace: str
    install: str
    files: tuple[str, ...]
    files_on: tuple[tuple[tuple[int, int], tuple[str, ...]], ...] = ()

    def patterns(self, capability: tuple[int, int]) -> tuple[str, ...]:
        """The globs for a device of this capability."""
        return dict(self.files_on).get(capability, self.files)


def find_library(library: Library, capability: tuple[int, int]) -> Finding:
    """The library's file for a device of this capability, as the value of the finding."""
    spec = spec_of(library.package, remedy=library.install)
    if isinstance(spec, Finding):
        return spec
    if spec is None:
        return lacking(library.package, "package_missing", f"{library.package} is not installed", library.install)
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    for pattern in library.patterns(capability):
        for folder in folders:
            for file in sorted(folder.glob(pattern)):
                if file.is_file():
                    return found(library.package, str(file), f"{library.package} has {file.name}")
    where = ", ".join(map(str, folders)) or "no folder"
    names = " or ".join(library.patterns(capability))
    reason = f"{library.package} is installed without its compiled library: no {names} in {where}"
    return lacking(library.package, "package_broken", reason, library.install)
