"""One launch to compile ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kernelhub.probes.device import DeviceFacts


class Case(NamedTuple):
    """One configuration of a kernel: `launch` makes its adapter for a device and launches it once on fake tensors."""

    name: str
    launch: Callable[[DeviceFacts], None]
