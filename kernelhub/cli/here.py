"""What this machine can run, for any problem: devices, libraries, and why a kernel cannot run."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import kernelhub
from kernelhub.dispatch.constraint import Package, Rejection, Rule
from kernelhub.dispatch.fingerprint import packages_of
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.registry import Registered
from kernelhub.dispatch.selection import Selection
from kernelhub.dispatch.standing import OPT_IN, UNTRUSTED
from kernelhub.probes import here
from kernelhub.probes.device import DeviceFacts
from kernelhub.probes.finding import Finding

LAYOUT = "layout"  # code of a rejection for the layout of weights, which packing resolves


def devices() -> list[DeviceFacts]:
    """The kinds of GPU of this machine, each once; the CPU if there is none."""
    return list(dict.fromkeys(here.gpus())) or [here.cpu()]


def measured_devices() -> list[DeviceFacts]:
    """The devices with stored results: `devices`, and the CPU."""
    return list(dict.fromkeys([*devices(), here.cpu()]))


def plain_selection(op: str, device: DeviceFacts) -> Selection[Any]:
    """The selection for a plain call of an op on a device."""
    return _plain_selection(HUB.generation, op, device)


@functools.lru_cache(maxsize=256)
def _plain_selection(generation: int, op: str, device: DeviceFacts) -> Selection[Any]:
    return kernelhub.explain(op, device=device)


def library(registered: Registered) -> Finding | None:
    """The library of a backend, in the versions that its records require; None if it has none.

    Of several libraries, the first that is installed.
    """
    found = libraries_of(registered)
    return next((finding for finding in found if finding.ok), found[0] if found else None)


def libraries_of(registered: Registered) -> list[Finding]:
    """Every installed library that provides a backend's kernels, in any version; if none is, the one that names it.

    Other packages that a kernel needs are not included.
    """
    if registered.backend is None or not registered.backend.package:
        return []
    own = registered.backend.package
    wanted: dict[str, Package] = {}
    for kernel in registered.kernels:
        alone = {constraint.name for constraint in kernel.constraints if isinstance(constraint, Package)}
        for package in packages_of(kernel.constraints):
            if package.name == own or own not in alone:
                wanted.setdefault(package.name, package)
    primary = HUB.machine.package(wanted.pop(own, Package(own)))
    found = [primary, *map(HUB.machine.package, wanted.values())]
    return [finding for finding in found if finding.code != "package_missing"] or [primary]


_OF_POLICY = (LAYOUT, UNTRUSTED, OPT_IN)


def obstacles(kernel: Kernel, selection: Selection[Any]) -> tuple[Rejection, ...]:
    """Rejections of a kernel on this machine for any problem: device, packages, settings, defects.

    They come from the selection on some problem, without rejections that depend on that problem: its facets, also in a
    rule that compares them with the device, and the layout of its weights, which can be packed. Trust is left out too,
    since a kernel that is not verified here can run and be verified.
    """
    decision = next(item for item in selection.decisions if item.kernel == kernel.name)
    blame = _of_the_problem_alone(kernel, selection.problem)
    return tuple(item for item in decision.rejections if item not in blame and item.code not in _OF_POLICY)


def _of_the_problem_alone(kernel: Kernel, problem: Any) -> list[Rejection]:
    """Rejections by constraints on facets other than the device, or by rules on more than the device."""
    rejections = []
    for constraint in kernel.constraints:
        of_problem = isinstance(constraint, Rule) or "device" not in constraint.fields
        if of_problem and set(constraint.fields) - {"device"}:
            with contextlib.suppress(Exception):  # the selection reports what a third party's constraint raises
                rejections.append(constraint.reject(problem, HUB.machine))
    return [rejection for rejection in rejections if rejection is not None]
