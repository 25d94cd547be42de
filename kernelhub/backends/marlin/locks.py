"""Memory with which the blocks of a Marlin kernel wait for each other.

It has to be zero at the start, and is again at the end. Two calls at once must not share it, so each stream has its
own; a captured call has its own too, which the graph makes zero, since a graph may be replayed on any stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.graph_memory import of_graph


class Locks:
    """One count for each multiprocessor."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, int], Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """Zeros for a call on the device's current stream."""
        if device.type != "cuda":
            return _zeros(device)
        index = torch.cuda.current_device() if device.index is None else device.index
        if of_graph(index):
            return _zeros(device)
        key = index, torch._C._cuda_getCurrentRawStream(index)
        found = self._of.get(key)
        if found is None:
            found = self._of[key] = _zeros(device)
        return found


def _zeros(device: torch.device) -> Tensor:
    count = 256  # more than any device has
    if device.type == "cuda":
        count = torch.cuda.get_device_properties(device).multi_processor_count
    return torch.zeros(count, dtype=torch.int32, device=device)
