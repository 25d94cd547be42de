"""Memory that the ranks of a group map from each other: two sets of slots, and behind them three that take turns.

`slots.py` and `turns.py` of `backends/triton/comm` say how calls pass values through them, of all kernels alike.

Made when a plan connects its ranks, and kept with the adapters that use it, so as long as their plans and captured
graphs.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernelhub.backends.shared import symmetric
from kernelhub.backends.shared.launches import Shared
from kernelhub.errors import KernelUnavailable
from kernelhub.ops.comm.group import meet

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MOST_RANKS = 8
MOST_PROGRAMS = 512  # of a grid; each has a counter
UNIT = 16  # bytes
SETS = 3  # of slots that take turns
_NO_STREAM = 2**64 - 1


class Workspace:
    """Slots of one rank, and where those of the other ranks are.

    Args:
        rank: this rank.
        memory: uint8 ``[slots_bytes(world_size, capacity)]`` of this rank, whose slots this empties.
        addresses: of the memory of each rank, in this process.
        capacity: of the slot of a sender, in units of 16 bytes.

    Attributes:
        slots: the addresses; 0 beyond the last rank.
        counters: int32 [MOST_PROGRAMS], as `slots.py` describes.
        turn_slots: the addresses of the slots of `turns.py`, of `turn_bytes` each.
        turn_counters: int32 [MOST_PROGRAMS], as that describes.
        missing: int8 [MOST_RANKS] in memory of the host: 1 for a rank that was waited for too long.
        owner: a weak reference to the group; None where nobody said which it is.
    """

    def __init__(self, rank: int, memory: Tensor, addresses: Sequence[int], capacity: int) -> None:
        self.rank, self.world_size, self.capacity, self.device = rank, len(addresses), capacity, memory.device
        self.slots = (*addresses, *[0] * (MOST_RANKS - len(addresses)))
        behind = _two_sets_bytes(self.world_size, capacity)
        self.turn_slots = tuple(address and address + behind for address in self.slots)
        self._memory = memory.fill_(0xFF)  # every element empty
        self.counters, self.turn_counters = torch.zeros(2, MOST_PROGRAMS, dtype=torch.int32, device=self.device)
        self.missing = torch.zeros(MOST_RANKS, dtype=torch.int8, device="cpu", pin_memory=self.device.type == "cuda")
        self._missing = ctypes.c_uint64.from_address(self.missing.data_ptr())
        self._zeros: dict[int, Tensor] = {}
        self._raw_stream = ctypes.c_uint64(_NO_STREAM)
        self._stream: torch.cuda.Stream | None = None
        self.owner: Callable[[], Any] | None = None

    def shared(self, *more: Tensor) -> Shared:
        """What a launch that is repeated reads and writes beside its operands; one that `late` ends is not repeated.

        Nor is one on another stream than the last call's: see `follow_last_call`.
        """
        stream = ctypes.addressof(self._raw_stream) if self.device.type == "cuda" else 0
        return Shared((self.counters, self.turn_counters, self.missing, *more), self.missing.data_ptr(), stream, self)

    def zeros(self, count: int) -> Tensor:
        """int32 words that are zero between calls, the same ones for all kernels that need as many.

        They are kept as long as the slots: a captured graph may outlive the adapter whose launch it has.
        """
        found = self._zeros.get(count)
        if found is None:
            found = self._zeros[count] = torch.zeros(count, dtype=torch.int32, device=self.device)
        return found

    def late(self) -> list[int]:
        """Ranks that some call waited for until its time was over; after that the workspace is of no use."""
        return [rank for rank, late in enumerate(self.missing.tolist()) if late] if self._missing.value else []

    def follow_last_call(self) -> None:
        """Let the current stream follow the stream of the last call: the slots serve one call after the other.

        What is captured follows what was captured before it into the same graph. When a graph is replayed, its caller
        orders it.
        """
        if self.device.type != "cuda":
            return
        raw_stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        if raw_stream == self._raw_stream.value:
            return
        current, last = torch.cuda.current_stream(self.device), self._stream
        if last is not None and _is_captured(last) == _is_captured(current):
            current.wait_stream(last)
        self._raw_stream.value, self._stream = raw_stream, current


_PURPOSE = "slots"
_made: weakref.WeakKeyDictionary[symmetric.Workspace, Workspace] = weakref.WeakKeyDictionary()


def workspace_for(group: ProcessGroup, device: torch.device, slot_bytes: int, timeout_s: float) -> Workspace:
    """The workspace of a group with slots of at least this size. All ranks call it, with the same size.

    The kernels of a group share it.

    Raises:
        RanksDisagree, RuntimeError: as of `symmetric.rendezvoused`.
    """
    world_size = group.size()
    size = slots_bytes(world_size, -(-slot_bytes // UNIT))
    shared = symmetric.rendezvoused(group, device, size, _PURPOSE, timeout_s)
    made = _made.get(shared)
    if made is None:
        bases = list(shared.handle.buffer_ptrs)
        begin = shared.buffer.data_ptr() - bases[shared.rank]  # newer allocators place buffers in larger blocks
        addresses = [base + begin for base in bases]
        capacity = (shared.num_bytes - slots_bytes(world_size, 0)) // _two_sets_bytes(world_size, 1)
        made = Workspace(shared.rank, shared.buffer, addresses, capacity)
        made.owner = weakref.ref(group)
        torch.cuda.synchronize(device)
        meet(_PURPOSE, group, {"op": _PURPOSE, "step": "slots are empty"}, timeout_s)
        _made[shared] = made
    return made


def workspace_before(group: ProcessGroup, slot_bytes: int) -> Workspace:
    """The workspace that another plan of the group has made, if its slots suffice.

    Raises:
        KernelUnavailable: there is none.
    """
    shared = symmetric.workspace_of(group, _PURPOSE)
    made = _made.get(shared)
    if made is None or made.capacity * UNIT < slot_bytes:
        raise KernelUnavailable(
            f"{_PURPOSE}: the workspace of the group {group.group_name!r} is smaller than this message; call the op's "
            "prepare on every rank, with the same backend= and settings as this call"
        )
    return made


def _is_captured(stream: torch.cuda.Stream) -> bool:
    """Whether a stream is being captured; the default one cannot be, nor asked while another is."""
    if not stream.cuda_stream:
        return False
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def slots_bytes(world_size: int, capacity: int) -> int:
    """Bytes of two sets of slots, one slot for each other rank, and of three sets of `turns.py`."""
    return _two_sets_bytes(world_size, capacity) + SETS * (world_size - 1) * turn_bytes(world_size)


def turn_bytes(world_size: int) -> int:
    """Of a slot that is one of three sets: the kernels of more ranks use them for few rows only."""
    return 1 << 20 if world_size == 2 else 256 << 10


def _two_sets_bytes(world_size: int, capacity: int) -> int:
    return 2 * (world_size - 1) * capacity * UNIT
