"""Problem classes: an op's problem without what no other process could have.

A class is made of plain values, the same in every process and every version that has the same facets. Lock files,
agreements of ranks and the store of evidence are keyed by it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

from kernelhub.dispatch.problem import CHECKPOINT, WEIGHT_LAYOUT
from kernelhub.probes.device import DeviceFacts

Facets = tuple[tuple[str, Any], ...]
DeviceKey = tuple[str, str, str]


class ProblemClass(NamedTuple):
    """One problem class.

    Attributes:
        device: of `device_key`; None for a class that holds on any device.
        facets: of `facets_of`.
    """

    device: DeviceKey | None
    facets: Facets


def facets_of(problem: Any) -> Facets:
    """Name and value of every facet but the device, in the order of names."""
    kind: Any = type(problem)
    return tuple([(name, getattr(problem, name)) for name in _names(kind)])


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(sorted(item.name for item in dataclasses.fields(kind) if item.name != "device"))


def unpacked_facets(problem: Any) -> Facets:
    """The facets that a verification covers: weights as they lie in a checkpoint.

    Packed weights are the arrangement of one kernel, made from a checkpoint's, and are verified with it.
    """
    facets = facets_of(problem)
    if getattr(problem, WEIGHT_LAYOUT, CHECKPOINT) == CHECKPOINT:
        return facets
    return tuple((name, CHECKPOINT if name == WEIGHT_LAYOUT else value) for name, value in facets)


def as_packed(facets: Facets, layouts: Iterable[str]) -> list[Facets]:
    """The facets of the same problem with weights in other layouts, if they now lie as in a checkpoint."""
    if (WEIGHT_LAYOUT, CHECKPOINT) not in facets:
        return []
    packed = [layout for layout in layouts if layout != CHECKPOINT]
    return [tuple((name, layout if name == WEIGHT_LAYOUT else value) for name, value in facets) for layout in packed]


def device_key(device: DeviceFacts) -> DeviceKey:
    """Vendor, architecture and name: a device that is described and one that is here are the same."""
    return device.vendor, device.arch, device.name
