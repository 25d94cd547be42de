"""One kernel as one rank of a group launches it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton

from kernelhub.backends.shared.connected import Connected
from kernelhub.backends.shared.operands import on_device_of
from kernelhub.backends.shared.slot_memory import MOST_PROGRAMS, UNIT, Workspace, turn_bytes
from kernelhub.backends.triton.comm.tiles import Tile
from kernelhub.backends.triton.launch import Launcher

_LONGEST_US = 2**31 - 1


class Connection(Connected):
    """A kernel of one op, launched over the workspace of a group: see `Connected`.

    Args:
        op: for messages.
        kernel: the jitted function.
        static: its static arguments, without those of the group.
        tile: how it is launched.
        workspace: of the group.
        words: how many it needs that are zero between calls.
        turns: it uses the slots of `turns.py`.
        registers: most of a thread; 0: the compiler's choice.
        cluster: programs of a cluster.
        early: of `early.py`: when the launch after this one may begin, and so this one; 0: as any other.
        eager: a launch that is not captured may begin early, too, which takes the host longer.

    Attributes:
        in_place: launches the calls whose result is in the place of an operand, if this one does not.
    """

    def __init__(
        self,
        op: str,
        kernel: Any,
        static: Mapping[str, Any],
        tile: Tile,
        workspace: Workspace,
        words: int = 0,
        turns: bool = False,
        registers: int = 0,
        cluster: int = 1,
        early: int = 0,
        eager: bool = False,
    ) -> None:
        super().__init__(op, workspace, words)
        self.in_place: Connection | None = None
        self._tile = tile
        of_group = {"RANK": workspace.rank, "WORLD": workspace.world_size}
        fixed = {**static, **of_group, "MOST": MOST_PROGRAMS, "CLOCK": not triton.knobs.runtime.interpret}
        options: dict[str, Any] = {"maxnreg": registers} if registers else {}
        options |= {"launch_pdl": True} if early else {}
        options |= {"cluster": cluster, "captured_only": not eager}
        self._launch = Launcher(kernel, fixed, num_warps=tile.warps, num_stages=1, **options)
        counters, slots = workspace.counters, workspace.slots
        capacity = workspace.capacity
        if turns:
            counters, slots, capacity = (
                workspace.turn_counters,
                workspace.turn_slots,
                turn_bytes(workspace.world_size) // UNIT,
            )
        self._middle = (counters, workspace.missing, *slots)
        self._last = (capacity, tile.ahead)

    def compile(self, operands: tuple[Any, ...], sizes: tuple[Any, ...]) -> None:
        """Compile and load what launches with such operands need."""
        with on_device_of(operands[0]):
            self._launch.prepare(1, self._workspace.device, *operands, *self._middle, *sizes, *self._last, _LONGEST_US)

    def __call__(self, tiles: int, operands: tuple[Any, ...], sizes: tuple[Any, ...], timeout_s: float) -> None:
        workspace = self._workspace
        self.check_ranks()
        limit_us = self.limit_us(timeout_s)
        with on_device_of(operands[0]):
            workspace.follow_last_call()
            self._launch(
                min(tiles, self._tile.programs),
                workspace.device,
                *operands,
                *self._middle,
                *sizes,
                *self._last,
                limit_us,
            )
