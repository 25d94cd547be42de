"""The constraint on torch's own build."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from kernelhub.dispatch.constraint import Rejection
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.problem import Problem
from kernelhub.probes.package import fits
from kernelhub.probes.torch_build import TorchBuild


@dataclass(frozen=True)
class TorchBuilt:
    """A torch that is built for this CUDA or a newer one, and of this version or a newer one if one is given."""

    cuda: str
    at_least: str = ""

    fields = ("device",)

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        return _reject(machine.torch_for(problem.device), self.cuda, self.at_least)


@functools.lru_cache(maxsize=256)
def _reject(build: TorchBuild, cuda: str, at_least: str) -> Rejection | None:
    if build.cuda is not None and fits(build.cuda, f">={cuda}") and fits(build.version, f">={at_least or 0}"):
        return None
    needed = f"{at_least} for CUDA {cuda}" if at_least else f"CUDA {cuda}"
    release = f'pip install "torch>={at_least}"' if at_least else "install a torch"
    return Rejection("package_version", f"{build}, {needed} is needed", f"{release}, built for CUDA {cuda} or newer")
