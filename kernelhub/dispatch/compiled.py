"""The constraint that a package's compiled library is here."""

from __future__ import annotations

from dataclasses import dataclass

from kernelhub.dispatch.constraint import Rejection
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.problem import Problem
from kernelhub.probes.package import Library, find_library


@dataclass(frozen=True)
class Compiled:
    """The file of a compiled library, for the problem's device. That its package is missing is for `Package` to say."""

    library: Library

    fields = ("device",)

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        capability = problem.device.capability
        key = ("library", self.library, self.library.patterns(capability))
        finding = machine.ask(key, lambda: find_library(self.library, capability))
        if finding.ok or finding.code == "package_missing":
            return None
        return Rejection(finding.code, finding.reason, finding.remedy)
