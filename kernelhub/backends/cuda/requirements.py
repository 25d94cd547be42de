"""What every CUDA kernel of ours needs on the machine. NVRTC is looked up, not loaded, until a kernel is prepared."""

from __future__ import annotations

from dataclasses import dataclass

from kernelhub.dispatch.constraint import OnDevice, Package, Rejection
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.problem import Problem
from kernelhub.probes import toolchain
from kernelhub.probes.finding import Finding
from kernelhub.runtime.caches import root
from kernelhub.runtime.caches.notices import say

INSTALL = 'pip install "cuda-bindings[all]>=12.8,<14"'


@dataclass(frozen=True)
class Nvrtc:
    """NVIDIA's run-time compiler, which torch for CUDA brings."""

    fields = ("device",)

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        if problem.device.vendor != "nvidia":
            return None
        return machine.ask("NVRTC", toolchain.nvrtc, "nvrtc").rejection


@dataclass(frozen=True)
class WritableCache:
    """A folder that keeps what was compiled, or one filled before."""

    fields = ("device",)

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        if problem.device.vendor != "nvidia":
            return None
        return machine.ask("cuda cache", _kept).rejection


def _kept() -> Finding:
    """The answer; a bad one is said, since slower kernels run in place of ours."""
    finding = root.keeps("nvrtc")
    if not finding.ok:
        reason = f"{finding.code}: {finding.reason}"
        say("cache_unavailable", "nvrtc", f"kernels of cuda are not selected and slower kernels may run: {reason}")
    return finding


MACHINE = (
    OnDevice("nvidia", at_least=(8, 0)),
    Package("cuda", ">=12.8,<14", distribution="cuda-bindings", install=INSTALL),
    Nvrtc(),
    WritableCache(),
)
