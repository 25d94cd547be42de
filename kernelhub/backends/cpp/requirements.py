"""What every C++ kernel asks of the machine. Looked up, not run: compiling waits until a kernel is prepared."""

from __future__ import annotations

from dataclasses import dataclass

from kernelhub.dispatch.constraint import OnDevice, Rejection
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.problem import Problem
from kernelhub.probes import compiler
from kernelhub.runtime.caches import root


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler."""

    fields = ("device",)

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        if problem.device.type != "cpu":
            return None
        finding = machine.ask("C++ compiler", compiler.cxx_compiler, "c++")
        return None if finding.ok else Rejection(finding.code, finding.reason, finding.remedy)


@dataclass(frozen=True)
class WritableCache:
    """A folder that keeps what was compiled: the one that is named, the next best, or one filled before."""

    fields = ("device",)

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        if problem.device.type != "cpu":
            return None
        finding = machine.ask("kernelhub cache", lambda: root.keeps("cpp", executable=True))
        return None if finding.ok else Rejection(finding.code, finding.reason, finding.remedy)


MACHINE = (OnDevice("cpu"), Compiler(), WritableCache())
