"""Where the compiled libraries lie, told from names of files. Nothing is imported or loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kernelhub.probes.finding import Finding, found, lacking
from kernelhub.probes.package import spec_of


@dataclass(frozen=True)
class Library:
    """A compiled library of a package.

    Attributes:
        package: import name of the package whose folder it lies in.
        namespace: the namespace of its operators in torch.
        install: what to do where it is missing.
    """

    package: str
    namespace: str
    install: str

    def patterns(self, capability: tuple[int, int]) -> tuple[str, ...]:
        """Names of its file, below the package's folder, in the order in which they are taken."""
        if self.package == "vllm":  # the first since it is built against torch's stable interface
            return ("_C_stable_libtorch*.so", "_C.abi3.so")
        own = "sm90" if capability == (9, 0) else "sm100"  # compiled for all devices both, told apart by fast math
        return (f"{own}/common_ops*.so", "common_ops*.so")


VLLM = Library("vllm", "_C", 'pip install "vllm>=0.33"')
SGL = Library("sgl_kernel", "sgl_kernel", "pip install sglang-kernel")
SGL_OLD = Library("sgl_kernel", "sgl_kernel", 'pip install "sgl-kernel==0.3.21"')


def find(library: Library, capability: tuple[int, int]) -> Finding:
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
