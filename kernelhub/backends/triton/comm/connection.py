"""One kernel as one rank of a group launches it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
from torch import Tensor

from kernelhub.backends.shared.operands import on_device_of
from kernelhub.backends.shared.repeat import Repeated
from kernelhub.backends.triton.comm.tiles import Tile
from kernelhub.backends.triton.comm.workspace import MOST_PROGRAMS, UNIT, Workspace, turn_bytes
from kernelhub.backends.triton.launch import Launcher
from kernelhub.errors import RanksDisagree

_LONGEST_US = 2**31 - 1
_ALIGNMENT = 16  # bytes: a load of a thread


class Connection:
    """A kernel of one op, launched over the workspace of a group.

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
        repeated: the calls over this workspace that are repeated.
        words: those.
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
        self._op, self._workspace, self._tile = op, workspace, tile
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
        self._timeout_s, self._limit_us = 0.0, 0
        self.in_place: Connection | None = None
        self.words = workspace.zeros(words)
        self.repeated = Repeated(shared=workspace.shared(self.words))

    @property
    def slot_bytes(self) -> int:
        """What the slot of a sender holds."""
        return self._workspace.capacity * UNIT

    def serves(self, group: Any) -> bool:
        """Whether the workspace is this group's."""
        return self._workspace.owner is None or self._workspace.owner() is group

    def check_ranks(self) -> None:
        """Raise RanksDisagree if another rank did not join an earlier call in time."""
        late = self._workspace.late()
        if late:
            raise _missing(self._op, self._workspace, late)

    def compile(self, operands: tuple[Any, ...], sizes: tuple[Any, ...]) -> None:
        """Compile and load what launches with such operands need."""
        with on_device_of(operands[0]):
            self._launch.prepare(1, self._workspace.device, *operands, *self._middle, *sizes, *self._last, _LONGEST_US)

    def __call__(self, tiles: int, operands: tuple[Any, ...], sizes: tuple[Any, ...], timeout_s: float) -> None:
        """Launch on the current stream, after the calls of the group before this one.

        Args:
            tiles: how many the message has.
            operands: contiguous tensors on 16 bytes.
            sizes: scalar arguments of the kernel.
            timeout_s: longest wait for other ranks.

        Raises:
            RanksDisagree: another rank did not join a call before this one in time.
        """
        workspace = self._workspace
        self.check_ranks()
        if timeout_s != self._timeout_s:
            self._timeout_s, self._limit_us = timeout_s, min(int(timeout_s * 1e6), _LONGEST_US)
        with on_device_of(operands[0]):
            workspace.follow_last_call()
            self._launch(
                min(tiles, self._tile.programs),
                workspace.device,
                *operands,
                *self._middle,
                *sizes,
                *self._last,
                self._limit_us,
            )


def _missing(op: str, workspace: Workspace, late: list[int]) -> RanksDisagree:
    names = ", ".join(map(str, late))
    return RanksDisagree(
        "rank_missing",
        f"{op}: rank {workspace.rank} of {workspace.world_size} waited in vain for rank {names} in an earlier call, "
        "whose result lacks it (a sum holds NaN); see the log of that rank, raise KERNELHUB_COMM_TIMEOUT_S if it was "
        "only slow, and restart all ranks",
        tuple(late),
    )


class Connections:
    """The connections of one adapter, by the names of its groups."""

    def __init__(self) -> None:
        self._of: dict[str, Connection] = {}

    def get(self, group: Any) -> Connection | None:
        """That of a group; there is none for a later group with the name of one that was destroyed."""
        found = self._of.get(group.group_name)
        return found if found is None or found.serves(group) else None

    def keep(self, group_name: str, connection: Connection) -> Connection:
        """Serve a group by this connection, and repeat no call over the one before."""
        before = self._of.get(group_name)
        self._of[group_name] = connection
        if before is not None:
            before.repeated.clear()
        return connection


def is_aligned(tensor: Tensor) -> bool:
    """Whether a kernel can read or write a tensor where it is."""
    return tensor.is_contiguous() and not tensor.data_ptr() % _ALIGNMENT


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy that a kernel can read."""
    return tensor if is_aligned(tensor) else fresh(tensor).copy_(tensor)


def fresh(tensor: Tensor) -> Tensor:
    """Memory of a tensor's shape that a kernel can write."""
    return tensor.new_empty(tensor.shape)
