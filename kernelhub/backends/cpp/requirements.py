"""What every C++ kernel needs on the machine. The compiler is looked up, not run, until a kernel is prepared."""

from __future__ import annotations

from dataclasses import dataclass

from kernelhub.dispatch.constraint import OnDevice, Rejection
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.problem import Problem
from kernelhub.dispatch.standing import verified
from kernelhub.probes import toolchain
from kernelhub.probes.finding import Finding
from kernelhub.runtime.caches import root
from kernelhub.runtime.caches.notices import say


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler, unless the wheel carries the kernels compiled."""

    fields = ("device",)

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        if problem.device.type != "cpu" or toolchain.cpu_kernels().ok:
            return None
        return machine.ask("C++ compiler", toolchain.cxx_compiler, "c++").rejection


@dataclass(frozen=True)
class WritableCache:
    """A folder that keeps what was compiled: the one that is named, the next best, or one filled before.

    None is needed where the wheel carries the kernels compiled.
    """

    fields = ("device",)

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        if problem.device.type != "cpu" or toolchain.cpu_kernels().ok:
            return None
        return machine.ask("kernelhub cache", _kept).rejection


def _kept() -> Finding:
    """The answer; a bad one is said, since slower kernels run in place of ours."""
    finding = root.keeps("cpp", executable=True)
    if not finding.ok:
        reason = f"{finding.code}: {finding.reason}"
        say("cache_unavailable", "cpp", f"kernels of cpp are not selected on this CPU and slower kernels run: {reason}")
    return finding


MACHINE = (OnDevice("cpu"), Compiler(), WritableCache())


STANDINGS = (
    verified(
        "cpu",
        evidence="CPU, 2 cores, 2026-11-27, torch 2.13.0+cpu: 1022 tests of this backend passed, none failed "
        "(benchmarks/results/verification_cpu.json)",
    ),
)
