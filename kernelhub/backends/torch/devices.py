"""Where torch kernels run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernelhub.dispatch.constraint import AnyOf, OnDevice, Rejection
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.problem import Problem
from kernelhub.probes.finding import Finding, found, lacking
from kernelhub.probes.package import fits

CPU = OnDevice("cpu")
ANYWHERE = AnyOf((CPU, OnDevice("nvidia"), OnDevice("amd")))


@dataclass(frozen=True)
class Torch:
    """A torch of this version or newer, built for this CUDA or a newer one."""

    at_least: str
    cuda: str

    fields = ()

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        finding = machine.ask(self, self._look)
        return None if finding.ok else Rejection(finding.code, finding.reason, finding.remedy)

    def _look(self) -> Finding:
        version, built = torch.__version__, torch.version.cuda
        here = f"torch {version} is built for {f'CUDA {built}' if built else 'no CUDA'}"
        if built is not None and fits(built, f">={self.cuda}") and fits(version, f">={self.at_least}"):
            return found("torch", version, here)
        remedy = f'pip install "torch>={self.at_least}", built for CUDA {self.cuda} or newer'
        return lacking(
            "torch", "package_version", f"{here}, {self.at_least} for {self.cuda} is needed", remedy, version
        )
