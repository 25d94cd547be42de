"""Which kernels can run here."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch

import torch

from kernelhub.dispatch.hub import HUB
from kernelhub.evidence.verify import _could_run
from tests.fuzz.bases import DEFAULT


def ops() -> tuple[str, ...]:
    """Every op, in the order of registration."""
    _ = HUB.settings
    return tuple(HUB.registry.contracts)


def kernels_here(
    op: str, device: str, backends: Sequence[str] | None = None, names: Sequence[str] | None = None
) -> list[str]:
    """The kernels of an op that nothing speaks against on a device, and `DEFAULT`."""
    _ = HUB.settings
    found = []
    for kernel in HUB.registry.candidates(op).kernels:
        wanted = backends is None or any(kernel.matches(word) or fnmatch(kernel.name, word) for word in backends)
        if wanted and _could_run(kernel, torch.device(device)):
            found.append(kernel.name)
    if backends is None:
        found.append(DEFAULT)
    return [name for name in found if names is None or any(fnmatch(name, word) for word in names)]
