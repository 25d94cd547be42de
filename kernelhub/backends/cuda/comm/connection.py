"""One CUDA kernel as one rank of a group launches it, over the slots that take turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelhub.backends.cuda import library
from kernelhub.backends.shared.connected import Connected
from kernelhub.backends.shared.slot_memory import UNIT, Workspace, turn_bytes
from kernelhub.probes.device import DeviceFacts


class Connection(Connected):
    """A kernel whose parameters are those of `slots.h` behind its operands; see `Connected`.

    Args:
        op: for messages.
        source, function: of csrc/cuda.
        constants: without those of the group.
        device: its facts.
        threads: of a block.
        workspace: of the group.
        operands: how many tensors the kernel takes.
        numbers: its scalar arguments, as of `struct`.
    """

    def __init__(
        self,
        op: str,
        source: str,
        function: str,
        constants: Mapping[str, str | int],
        device: DeviceFacts,
        threads: int,
        workspace: Workspace,
        operands: int,
        numbers: str,
    ) -> None:
        super().__init__(op, workspace)
        others = [rank for rank in range(workspace.world_size) if rank != workspace.rank]
        # The driver begins no launch of these early: see `triton/comm/early.py` for what that would take.
        made = library.library(source, {**constants, "OVERLAPS": 0}, device)
        packing = f"{operands}PPPq{len(others)}QQqq{numbers}"
        self._kernel = made.kernel(function, packing)
        self._threads = threads
        sender = turn_bytes(workspace.world_size)
        places = [(rank, workspace.rank - (workspace.rank > rank)) for rank in others]
        to = [workspace.turn_slots[rank] + place * sender for rank, place in places]
        self._group = (workspace.turn_counters, workspace.missing, workspace.rank, *to)
        self._group += (workspace.turn_slots[workspace.rank], sender // UNIT)
        made.function(function, workspace.device.index)

    def __call__(self, tiles: int, operands: tuple[Any, ...], sizes: tuple[Any, ...], timeout_s: float) -> None:
        workspace = self._workspace
        self.check_ranks()
        workspace.follow_last_call()
        device = workspace.device.index
        self._kernel(device, tiles, self._threads, *operands, *self._group, self.limit_us(timeout_s), *sizes)
