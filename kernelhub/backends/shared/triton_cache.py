"""What kernels that Triton compiles ask of its cache on disk."""

from __future__ import annotations

from dataclasses import dataclass

from kernelhub.dispatch.constraint import Rejection
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.problem import Problem
from kernelhub.probes import cache


@dataclass(frozen=True)
class WritableCache:
    """Triton must have a writable cache."""

    fields = ("device",)

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        if problem.device.type == "cpu":
            return None
        return machine.ask(
            "triton cache", lambda: cache.writable(cache.triton_cache_folder(), "TRITON_CACHE_DIR")
        ).rejection
