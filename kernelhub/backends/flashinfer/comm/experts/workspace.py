"""The workspace of FlashInfer's one-sided exchange: counters, flags and rows of each rank, which all ranks access.

The library's class makes it by `MnnvlMemory`, which requires fabric handles, or in older releases the permission to
trace other processes. Its functions take any tensor ``[W, bytes]`` whose rows are the memory of the ranks. So kernelhub
makes it in torch's symmetric memory, without multicast, and maps it as one `Window`.

A workspace is of one op. Its layout depends on the most tokens that it has room for, so that there is one for each
power of two of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from flashinfer.comm.dlpack_utils import pack_strided_memory
from flashinfer.comm.trtllm_moe_alltoall import get_moe_alltoall_module, moe_a2a_initialize
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from kernelhub.backends.flashinfer.comm.experts.window import Window
from kernelhub.backends.shared import symmetric
from kernelhub.backends.shared.operands import up_to
from kernelhub.errors import KernelUnavailable
from kernelhub.ops.comm.group import meet

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_ALIGNMENT_BYTES = 128  # of the parts of a workspace
_LEAST_TOKENS = 256  # that a layout has room for, which takes 45 KB
_MOST_BYTES = 1 << 31  # of the tokens of a rank, which the kernels count in 32 bits


class Exchange:
    """A workspace as one rank uses it.

    Args:
        memory: uint8 ``[W, bytes]``, of all ranks. This clears that of this rank.
        rank: this rank.
        room: most tokens of a rank.
        barrier: waits on the current stream until all ranks are there, up to so many seconds.
        owner: kept as long as this.

    Attributes:
        metainfo: what the library's functions take beside the memory.
    """

    def __init__(
        self, memory: Tensor, rank: int, room: int, barrier: Callable[[float], None], owner: Any = None
    ) -> None:
        self.memory, self.rank, self.barrier = memory, rank, barrier
        self.world_size, self._owner = memory.shape[0], owner
        self.metainfo = moe_a2a_initialize(workspace=memory, ep_rank=rank, ep_size=self.world_size, max_num_tokens=room)
        offsets = from_dlpack(self.metainfo).tolist()
        names, indices = get_moe_alltoall_module().moe_a2a_get_metainfo_index_pairs()
        places = zip(map(str, names), map(int, indices), strict=True)
        self._offsets = {name: offsets[index] for name, index in places if index < len(offsets)}

    def offset(self, part: str) -> int:
        """Where a part of a rank's memory begins, by the library's name without what all names share."""
        return int(self._offsets[f"MOE_A2A_{part}_OFFSET_INDEX"])

    def own(self, part: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The beginning of a part of this rank's memory."""
        begin, count = self.offset(part), torch.Size(shape).numel()
        return self.memory[self.rank, begin : begin + count * dtype.itemsize].view(dtype).view(shape)


_made: weakref.WeakKeyDictionary[symmetric.Workspace, Exchange] = weakref.WeakKeyDictionary()


def exchange_for(
    op: str, group: ProcessGroup, device: torch.device, max_tokens: int, row_bytes: int, timeout_s: float
) -> Exchange:
    """The workspace of a group with room for so many tokens of a rank. All ranks call it, with the same sizes.

    Raises:
        KernelUnavailable: the kernels cannot count so many bytes, symmetric memory is not CUDA's, or the driver
            refuses.
        RanksDisagree, RuntimeError: as of `symmetric.rendezvoused`.
    """
    _check_memory(device)
    get_moe_alltoall_module()  # compiles or loads the code, while no rank waits for another on its GPU
    purpose, size = _purpose(op, max_tokens), _bytes(group.size(), max_tokens, row_bytes)
    shared = symmetric.rendezvoused(group, device, size, purpose, timeout_s)
    made = _made.get(shared)
    if made is None:
        blocks = list(shared.handle.buffer_ptrs)
        begin = shared.buffer.data_ptr() - blocks[shared.rank]  # newer allocators place buffers in larger blocks
        window = Window(blocks, begin + shared.num_bytes, device)
        places = (window.address + begin, shared.num_bytes, window.stride, len(blocks), torch.uint8, device.index)
        handle = shared.handle  # not the workspace, whose end is that of this

        def barrier(limit_s: float) -> None:
            handle.barrier(0, max(1, int(1000 * limit_s)))  # 0 would be without limit

        with torch.cuda.device(device):
            memory = pack_strided_memory(*places)
            made = Exchange(memory, shared.rank, _room(max_tokens), barrier, window)
            torch.cuda.synchronize(device)
        meet(purpose, group, {"op": purpose, "step": "workspace is clear"}, timeout_s)
        _made[shared] = made
    return made


def exchange_before(op: str, group: ProcessGroup, max_tokens: int, row_bytes: int) -> Exchange:
    """The workspace that another plan of the group has made, if it is large enough.

    Raises:
        KernelUnavailable: there is none.
    """
    purpose = _purpose(op, max_tokens)
    shared = symmetric.workspace_of(group, purpose, _bytes(group.size(), max_tokens, row_bytes))
    made = _made.get(shared)
    if made is None:
        raise KernelUnavailable(f"{purpose}: no plan has connected the group {group.group_name!r}: call prepare again")
    return made


def _check_memory(device: torch.device) -> None:
    """NVSHMEM's memory has barriers that do nothing (pytorch#191858), and allocations that cannot be mapped again."""
    from torch.distributed import _symmetric_memory

    ask = getattr(_symmetric_memory, "get_backend", None)  # not in every torch
    backend = None if ask is None else ask(device)
    if backend not in (None, "CUDA"):
        raise KernelUnavailable(
            f"flashinfer.moe_a2a: the backend of torch's symmetric memory is {backend}, and it requires CUDA: leave "
            "out TORCH_SYMMMEM and torch.distributed._symmetric_memory.set_backend, or select another kernel"
        )


def _room(max_tokens: int) -> int:
    return max(_LEAST_TOKENS, 1 << (max_tokens - 1).bit_length())


def _purpose(op: str, max_tokens: int) -> str:
    return f"flashinfer.moe_a2a of {op}, up to {_room(max_tokens)} tokens"


def _bytes(world_size: int, max_tokens: int, row_bytes: int) -> int:
    if max_tokens * row_bytes >= _MOST_BYTES:
        raise KernelUnavailable(
            f"flashinfer.moe_a2a: {max_tokens} tokens of {row_bytes} bytes are not less than 2 GB: split the batch, or "
            "select another kernel, such as triton.push"
        )
    flags = get_moe_alltoall_module().moe_a2a_get_aux_data_size(world_size, _room(max_tokens))
    return up_to(int(flags), _ALIGNMENT_BYTES) + up_to(world_size * max_tokens * row_bytes, _ALIGNMENT_BYTES)
