"""Choices that stand fixed for a problem class: by a lock file, or by agreement of ranks.

A problem class is an op's problem without what no other process could have: its key is made of plain values, the same
in every process and every version that knows the same facets.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kernelhub.dispatch.constraint import Rejection
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.policy import Override
from kernelhub.dispatch.problem import CHECKPOINT, WEIGHT_LAYOUT
from kernelhub.probes.device import DeviceFacts

Facets = tuple[tuple[str, Any], ...]
DeviceKey = tuple[str, str, str]
Key = tuple[DeviceKey | None, Facets]

LOCK, RANKS = "lock", "ranks"  # sources of such overrides


def facets_of(problem: Any) -> Facets:
    """Name and value of every facet but the device, in the order of names."""
    kind: Any = type(problem)
    return tuple([(name, getattr(problem, name)) for name in _names(kind)])


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(sorted(item.name for item in dataclasses.fields(kind) if item.name != "device"))


def as_packed(facets: Facets, layouts: Iterable[str]) -> list[Facets]:
    """The classes of the same problem with weights in other layouts, where they now lie as in a checkpoint."""
    if (WEIGHT_LAYOUT, CHECKPOINT) not in facets:
        return []
    packed = [layout for layout in layouts if layout != CHECKPOINT]
    return [tuple((name, layout if name == WEIGHT_LAYOUT else value) for name, value in facets) for layout in packed]


def as_read(kernel: Kernel, problem: Any) -> Any:
    """The problem that a kernel runs: with weights in its own layout, where it reads none as in a checkpoint."""
    if not kernel.needs_packing or getattr(problem, WEIGHT_LAYOUT, CHECKPOINT) != CHECKPOINT:
        return problem
    return dataclasses.replace(problem, **{WEIGHT_LAYOUT: kernel.packs_to})


def device_key(device: DeviceFacts) -> DeviceKey:
    """Vendor, architecture and name: a device that is described and one that is here are the same."""
    return device.vendor, device.arch, device.name


@dataclass(frozen=True)
class Held:
    """What stands fixed for the problem classes of one op.

    Attributes:
        overrides: the kernels that run, by problem class.
        refusals: kernels that may not run, by problem class, each with why.
        of_device: whether a class is one of a device; else it holds on any.
        otherwise: what speaks against every kernel of a class that is not in `overrides`, if something does.
    """

    overrides: Mapping[Key, Override]
    refusals: Mapping[Key, Mapping[str, Rejection]] = field(default_factory=dict)
    of_device: bool = True
    otherwise: Rejection | None = None

    def key(self, problem: Any) -> Key:
        """The class of a problem."""
        return device_key(problem.device) if self.of_device else None, facets_of(problem)

    def __hash__(self) -> int:
        return id(self)
