"""The workspace of TensorRT-LLM's kernels, in memory that the ranks of a group map from each other.

The library's own function makes it in three allocations, by CUDA IPC or symmetric memory, in some releases (0.6.9 to
0.6.16) with NVLink multicast. The kernels read nothing but a table of addresses, which is the same from 0.6.0 to 0.7.2:
of each rank the staged message, the flags of a barrier, and three sets of slots that take turns, then five integers of
this rank. So kernelhub makes it: one allocation of each rank, without multicast, that is freed with the group.

One shot uses the slots, two shots the rest. A slot without a value holds -0, which no rank sends.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernelhub.backends.shared import symmetric
from kernelhub.errors import KernelUnavailable
from kernelhub.ops.comm.group import meet

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ONE_SHOT, TWO_SHOT = "flashinfer.trtllm_one_shot", "flashinfer.trtllm_two_shot"
_MOST_BLOCKS = 256  # that a barrier has flags of
_SETS = 3
_EMPTY = -(1 << 15)  # the bits of -0 in float16 and bfloat16


class Workspace:
    """Memory of one rank as the kernels use it, and where that of the other ranks is.

    Args:
        purpose: `ONE_SHOT` or `TWO_SHOT`.
        rank: this rank.
        memory: uint8 of this rank, as many bytes as `bytes_for` says or more, which this fills.
        addresses: of the memory of each rank, in this process.

    Attributes:
        table: int64 ``[3 * W + 1]``, the addresses that the kernels read.
    """

    def __init__(self, purpose: str, rank: int, memory: Tensor, addresses: Sequence[int]) -> None:
        self.rank, self.world_size = rank, len(addresses)
        flags = _flag_bytes(self.world_size) if purpose == TWO_SHOT else 0
        set_bytes = 0 if purpose == TWO_SHOT else memory.numel() // _SETS // 16 * 16
        if purpose == TWO_SHOT:
            memory[:flags].zero_()
        else:
            memory[: memory.numel() // 2 * 2].view(torch.int16).fill_(_EMPTY)
        self._memory = memory
        # A count of blocks, the flag of the barrier, the set in turn, bytes of a set, elements that the last call sent.
        self._state = torch.tensor([0, 0, 0, set_bytes, 0], dtype=torch.int32, device=memory.device)
        parts = (flags, 0, 0)  # where messages, flags and slots begin
        places = [address + begin for begin in parts for address in addresses]
        self.table = torch.tensor([*places, self._state.data_ptr()], dtype=torch.int64, device=memory.device)


def bytes_for(purpose: str, world_size: int, message_bytes: int) -> int:
    """Bytes of each rank for messages of this size, a multiple of 16."""
    if purpose == TWO_SHOT:
        return _flag_bytes(world_size) + 2 * message_bytes  # the message of this rank, and the sum
    return _SETS * world_size * message_bytes


def _flag_bytes(world_size: int) -> int:
    return 4 * _MOST_BLOCKS * world_size


_made: weakref.WeakKeyDictionary[symmetric.Workspace, Workspace] = weakref.WeakKeyDictionary()


def workspace_for(
    purpose: str, group: ProcessGroup, device: torch.device, message_bytes: int, timeout_s: float
) -> Workspace:
    """The workspace of a group for messages of at least this size. All ranks call it, with the same size.

    Raises:
        RanksDisagree, RuntimeError: as of `symmetric.rendezvoused`.
    """
    size = bytes_for(purpose, group.size(), message_bytes)
    shared = symmetric.rendezvoused(group, device, size, purpose, timeout_s)
    made = _made.get(shared)
    if made is None:
        bases = list(shared.handle.buffer_ptrs)
        begin = shared.buffer.data_ptr() - bases[shared.rank]  # newer allocators place buffers in larger blocks
        made = Workspace(purpose, shared.rank, shared.buffer, [base + begin for base in bases])
        torch.cuda.synchronize(device)
        meet(purpose, group, {"op": purpose, "step": "slots are empty"}, timeout_s)
        _made[shared] = made
    return made


def workspace_before(purpose: str, group: ProcessGroup, message_bytes: int) -> Workspace:
    """The workspace that another plan of the group has made, if it is large enough.

    Raises:
        KernelUnavailable: there is none.
    """
    shared = symmetric.workspace_of(group, purpose, bytes_for(purpose, group.size(), message_bytes))
    made = _made.get(shared)
    if made is None:
        raise KernelUnavailable(f"{purpose}: no plan has connected the group {group.group_name!r}: call prepare again")
    return made
