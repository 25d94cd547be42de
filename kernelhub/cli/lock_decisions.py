"""Decisions for lock files: computed now, and compared with those of a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kernelhub.dispatch.explain import problem_from
from kernelhub.dispatch.fingerprint import own_version
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.lock_file import Lock, Locked, order, whole_problem
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.problem_class import device_key
from kernelhub.dispatch.selection import Selection
from kernelhub.errors import ConfigurationError
from kernelhub.evidence.validity import digest_of
from kernelhub.ops.models.problems import Need
from kernelhub.probes.device import DeviceFacts

CHANGED, GONE, NEW, VERSIONS = "changed", "gone", "new", "versions"
_SOURCE = "source of "  # and a backend's name: an entry beside the versions of a third party's kernel


@dataclass(frozen=True)
class Difference:
    """A difference between a file's decision and the current one.

    Attributes:
        kind: ``"changed"`` (another kernel, or a third party's kernel from another source), ``"gone"`` (the op or a
            facet no longer exists), ``"new"`` (the model needs it and the file lacks it), ``"versions"`` (the same
            kernel, other versions of its libraries).
        was: the file's decision; None if new.
        now: the current decision; None if gone.
        why: the cause, as a sentence.
    """

    kind: str
    was: Locked | None
    now: Locked | None
    why: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)


def lock_for(needs: Iterable[Need], device: DeviceFacts, machine: Machine | None, model: Mapping[str, Any]) -> Lock:
    """The lock of the current selections, without the lock in force; `model` is that of `Lock`."""
    packing = bool(model.get("packing"))
    made = tuple(
        decide(need.op, dict(need.facets), need.phases, need.layers, device, machine, packing=packing) for need in needs
    )
    packages = {name: version for item in made for name, version in item.versions.items()}
    return Lock(device_key(device), made, model, own_version(), packages)


def decide(
    op: str,
    facets: Mapping[str, Any],
    phases: tuple[str, ...],
    layers: tuple[str, ...],
    device: DeviceFacts,
    machine: Machine | None,
    *,
    packing: bool = False,
) -> Locked:
    """The selection for a problem, with the details that a lock file records.

    With `packing`, weights of a checkpoint will be packed, so that kernels for packed weights are ranked too.
    """
    contract = HUB.record(op)
    problem = problem_from(contract, device, dict(facets))
    policy = dataclasses.replace(HUB.policy(op), pins=(), packing=packing)
    selection = HUB.select(op, problem, policy, machine)
    others = selection.decisions[1 if selection.kernel else 0 :]
    return Locked(
        op,
        {name: value for name, value in whole_problem(contract, facets) if value is not dataclasses.MISSING},
        selection.selected or "",
        _versions_of(selection.kernel, machine) if selection.kernel else {},
        _decided_by(selection),
        phases,
        layers,
        {item.kernel: item.reason for item in others if item.accepted},
        {item.kernel: f"{item.code}: {item.reason}" for item in others if not item.accepted},
    )


def differences(old: Lock, needs: Iterable[Need], device: DeviceFacts, machine: Machine | None) -> list[Difference]:
    """What would change if a lock were written now, in the order of its decisions; then the decisions it lacks."""
    found, known, packing = [], set(), bool(old.model.get("packing"))
    for was in old.decisions:
        try:
            now = decide(was.op, was.problem, was.phases, was.layers, device, machine, packing=packing)
        except ConfigurationError as error:
            found.append(Difference(GONE, was, None, str(error)))
            continue
        known.add(order(now))
        if now.kernel != was.kernel:
            found.append(Difference(CHANGED, was, now, _why(was, now)))
        elif source := next((name for name in now.versions if _is_other_source(name, was, now)), ""):
            found.append(Difference(CHANGED, was, now, f"{source} differs from the one that the file was written with"))
        elif dict(now.versions) != dict(was.versions):
            found.append(Difference(VERSIONS, was, now, _versions(was.versions, now.versions)))
    for item in lock_for(needs, device, machine, old.model).decisions:
        if order(item) not in known:
            found.append(Difference(NEW, None, item, f"{old.path} has no decision for it"))
    return found


def _versions_of(kernel: Kernel, machine: Machine | None) -> dict[str, str]:
    """Versions of a kernel's libraries; for a third party's kernel also its distribution's version and its source."""
    versions, registered = HUB.versions_of(kernel, machine), HUB.registry.backends[kernel.backend]
    if registered.builtin:
        return versions
    name, _, version = registered.distribution.partition(" ")
    own = {name: version} if version else {}
    return {**versions, **own, f"{_SOURCE}{kernel.backend}": digest_of(kernel)}


def _is_other_source(name: str, was: Locked, now: Locked) -> bool:
    return name.startswith(_SOURCE) and was.versions.get(name, now.versions[name]) != now.versions[name]


def _decided_by(selection: Selection[Any]) -> str:
    return f"{selection.source}: {selection.because}" if selection.kernel else selection.because


def _why(was: Locked, now: Locked) -> str:
    """The current state of the kernel that was selected."""
    if not was.kernel:
        return f"no kernel could run it; now {now.kernel} can"
    if was.kernel in now.refused:
        return f"{was.kernel} is refused now: {now.refused[was.kernel]}"
    if was.kernel in now.runner_ups:
        return f"{was.kernel} could still run: {now.runner_ups[was.kernel]}"
    return f"{was.kernel} is not registered in this version"


def _versions(was: Mapping[str, str], now: Mapping[str, str]) -> str:
    names = sorted(name for name in {*was, *now} if was.get(name) != now.get(name))
    return ", ".join(f"{name} {was.get(name, 'absent')} -> {now.get(name, 'absent')}" for name in names)
