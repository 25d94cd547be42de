"""What every Gluon kernel asks of the machine."""

from __future__ import annotations

from dataclasses import dataclass

from kernelhub.backends.shared.triton_cache import WritableCache
from kernelhub.dispatch.constraint import OnDevice, Package, Rejection
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.problem import Problem
from kernelhub.probes.finding import Finding, found, lacking
from kernelhub.probes.package import folders

# Gluon is experimental: names changed in 3.8 and 3.9 (language.py). These are the releases that kernels compile with.
VERSIONS = ">=3.6,<3.10"
_PLACE = "experimental/gluon/language/nvidia/hopper/__init__.py"


@dataclass(frozen=True)
class Language:
    """The installed Triton must contain Gluon with its functions for Hopper. Nothing is imported."""

    fields = ()

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        return machine.ask("gluon for hopper", _look).rejection


def _look() -> Finding:
    for folder in folders("triton"):
        if (folder / _PLACE).is_file():
            return found("gluon", str(folder), f"{folder} contains Gluon")
    return lacking(
        "gluon",
        "package_broken",
        "the installed triton has no triton.experimental.gluon with functions for Hopper",
        f'pip install "triton{VERSIONS}"',
    )


MACHINE = (OnDevice("nvidia", only=((9, 0),)), Package("triton", VERSIONS), Language(), WritableCache())
