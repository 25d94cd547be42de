"""Is a package's compiled library here? Told from names of files; nothing is imported or loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kernelhub.probes.finding import Finding, found, lacking
from kernelhub.probes.package import spec_of


@dataclass(frozen=True)
class Library:
    """A compiled library of a package, which registers operators with torch when it is loaded.

    Attributes:
        package: import name of the package whose folder it lies in.
        namespace: the namespace of its operators in torch.
        install: what to do where it is missing.
        files: globs of its file, below the package's folder, in the order in which they are taken.
        files_on: the same for devices of one compute capability, where a package has several builds.
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
    reason = f"{library.package} is here without its compiled library: no {names} in {where}"
    return lacking(library.package, "package_broken", reason, library.install)
