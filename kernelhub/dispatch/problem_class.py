"""Problem classes: problems as plain values that are the same in every process.

Lock files, agreements of ranks and the store of evidence use them as keys. Versions of kernelhub with the same facets
have the same classes.
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
        device: result of `device_key`; None for a class that applies to any device.
        facets: result of `facets_of`.
    """

    device: DeviceKey | None
    facets: Facets


def facets_of(problem: Any) -> Facets:
    """Name and value of every facet except the device, sorted by name."""
    kind: Any = type(problem)
    return tuple([(name, getattr(problem, name)) for name in _names(kind)])


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(sorted(item.name for item in dataclasses.fields(kind) if item.name != "device"))


def unpacked_facets(problem: Any) -> Facets:
    """The facets of a problem with the weight layout ``"checkpoint"``, under which verifications are stored.

    A kernel packs its weights from checkpoint weights, so that a verification covers both layouts.
    """
    facets = facets_of(problem)
    if getattr(problem, WEIGHT_LAYOUT, CHECKPOINT) == CHECKPOINT:
        return facets
    return tuple((name, CHECKPOINT if name == WEIGHT_LAYOUT else value) for name, value in facets)


def as_packed(facets: Facets, layouts: Iterable[str]) -> list[Facets]:
    """The facets of the same problem for each packed layout of checkpoint weights; else empty."""
    if (WEIGHT_LAYOUT, CHECKPOINT) not in facets:
        return []
    packed = [layout for layout in layouts if layout != CHECKPOINT]
    return [tuple((name, layout if name == WEIGHT_LAYOUT else value) for name, value in facets) for layout in packed]


def device_key(device: DeviceFacts) -> DeviceKey:
    """Vendor, architecture and name of a device; equal for a simulated device and a real one."""
    return device.vendor, device.arch, device.name
