"""What this machine can run, whatever the problem: devices, libraries, and what keeps a kernel from running."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from kernelhub.dispatch.constraint import Package, Rejection
from kernelhub.dispatch.fingerprint import packages_of
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.registry import Registered
from kernelhub.dispatch.selection import Selection
from kernelhub.probes.device import DeviceFacts, facts
from kernelhub.probes.finding import Finding

_BUILT_IN = "kernelhub.backends."


def devices() -> list[DeviceFacts]:
    """The kinds of GPU that are here, each once; the CPU if there is none."""
    if not torch.cuda.is_available():
        return [facts(torch.device("cpu"))]
    return list(dict.fromkeys(facts(torch.device("cuda", index)) for index in range(torch.cuda.device_count())))


def is_built_in(registered: Registered) -> bool:
    """Whether a backend is one of ours; others are plugins or were registered at run time."""
    return registered.origin.startswith(_BUILT_IN)


def library(registered: Registered) -> Finding | None:
    """The library behind a backend, in the versions that its records ask for; None if it has none."""
    if registered.backend is None or not registered.backend.package:
        return None
    name = registered.backend.package
    constraints = [constraint for kernel in registered.kernels for constraint in kernel.constraints]
    wanted = next((package for package in packages_of(constraints) if package.name == name), Package(name))
    return HUB.machine.package(wanted)


def obstacles(kernel: Kernel, verdict: Selection[Any]) -> tuple[Rejection, ...]:
    """What speaks against a kernel on this machine at all: device, packages, settings, defects.

    Taken from the verdict on some problem, less what only that problem's own facets are to blame for.
    """
    decision = next(item for item in verdict.decisions if item.kernel == kernel.name)
    blame = _of_the_problem_alone(kernel, verdict.problem)
    return tuple(rejection for rejection in decision.rejections if rejection not in blame)


def _of_the_problem_alone(kernel: Kernel, problem: Any) -> list[Rejection]:
    """Rejections by constraints that read the problem, and in it not the device."""
    rejections = []
    for constraint in kernel.constraints:
        if constraint.fields and "device" not in constraint.fields:
            with contextlib.suppress(Exception):  # what a foreign constraint raises is in the verdict
                rejections.append(constraint.reject(problem, HUB.machine))
    return [rejection for rejection in rejections if rejection is not None]
