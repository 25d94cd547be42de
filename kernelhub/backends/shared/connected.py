"""A connection of a group: what kernels over slots in memory of all ranks share, whatever they are written in.

A `Connected` launches one kernel of one op over the slots of a group, after the calls of the group before.
`Connections` are those of an adapter.
"""

from __future__ import annotations

import abc
from typing import Any, Generic, TypeVar

from torch import Tensor

from kernelhub.backends.shared.repeat import Repeated
from kernelhub.backends.shared.slot_memory import UNIT, Workspace
from kernelhub.errors import RanksDisagree

_LONGEST_US = 2**31 - 1
_ALIGNMENT = 16  # bytes: a load of a thread


class Connected(abc.ABC):
    """A kernel of one op, launched over the workspace of a group.

    Args:
        op: for messages.
        workspace: of the group.
        words: how many it needs that are zero between calls.

    Attributes:
        repeated: the calls over this workspace that are repeated.
        words: those.
    """

    def __init__(self, op: str, workspace: Workspace, words: int = 0) -> None:
        self._op, self._workspace = op, workspace
        self._timeout_s, self._limit_us = 0.0, 0
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

    @abc.abstractmethod
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

    def limit_us(self, timeout_s: float) -> int:
        """The longest wait, as kernels take it."""
        if timeout_s != self._timeout_s:
            self._timeout_s, self._limit_us = timeout_s, min(int(timeout_s * 1e6), _LONGEST_US)
        return self._limit_us


def _missing(op: str, workspace: Workspace, late: list[int]) -> RanksDisagree:
    names = ", ".join(map(str, late))
    return RanksDisagree(
        "rank_missing",
        f"{op}: rank {workspace.rank} of {workspace.world_size} waited in vain for rank {names} in an earlier call, "
        "whose result lacks it (a sum holds NaN); see the log of that rank, raise KERNELHUB_COMM_TIMEOUT_S if it was "
        "only slow, and restart all ranks",
        tuple(late),
    )


C = TypeVar("C", bound=Connected)


class Connections(Generic[C]):
    """The connections of one adapter, by the names of its groups."""

    def __init__(self) -> None:
        self._of: dict[str, C] = {}

    def get(self, group: Any) -> C | None:
        """That of a group; there is none for a later group with the name of one that was destroyed."""
        found = self._of.get(group.group_name)
        return found if found is None or found.serves(group) else None

    def keep(self, group_name: str, connection: C) -> C:
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
