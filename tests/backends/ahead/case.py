"""One launch to compile ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kernelhub.dispatch.constraint import OnDevice
from kernelhub.dispatch.hub import HUB
from kernelhub.probes.device import DeviceFacts


class Case(NamedTuple):
    """One configuration of a kernel: `launch` makes its adapter for a device and launches it once on fake tensors."""

    name: str
    launch: Callable[[DeviceFacts], None]


def is_for(op: str, adapter: type, problem: Any) -> bool:
    """The record of a kernel, or of the one that a test's adapter derives from, takes the problem's device."""
    records = {kernel.target: kernel for kernel in HUB.registry.candidates(op).kernels}
    targets = [f"{one.__module__}:{one.__qualname__}" for one in adapter.__mro__]
    record = next(records[target] for target in targets if target in records)
    devices = [limit for limit in record.constraints if isinstance(limit, OnDevice)]
    return all(limit.reject(problem, HUB.machine) is None for limit in devices)
