"""`all_reduce` by the operators of vLLM's and SGLang's compiled libraries, without their Python packages.

The engines give the operators memory that they share by CUDA IPC, which ends the process where an allocator has other
memory (expandable segments), and exchange the addresses of all inputs after they captured a graph. Here every call
copies `x` to this rank's part of a workspace in torch's symmetric memory, from which the kernel reads.

An operator finds the addresses of the ranks' inputs in a table on the device. In a capture it takes the next row of the
table for each call and trusts that it will be filled. All rows have the addresses of the workspace, from the start.
Rows of the libraries have 8 or 16 addresses, of which the first W count, so that a table of rows of 8 serves both. An
operator does not look at the end of the table: the adapter counts the calls of captures.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kernelhub.backends.custom_all_reduce.libraries import SGL, VLLM, Operators, operators_of
from kernelhub.backends.shared import symmetric
from kernelhub.backends.shared.operands import contiguous_copy, is_row_major, on_device_of
from kernelhub.errors import KernelUnavailable
from kernelhub.ops.comm.adapter import AllReduceAdapter
from kernelhub.ops.comm.group import OfGroups, meet
from kernelhub.ops.comm.problem import MESSAGE_BYTES, CollectiveProblem
from kernelhub.probes.package import Library

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_UNIT = 16  # bytes that a thread loads
_ALIGNMENT = 128  # of signals
_ROW, _LONGEST_ROW = 8, 16  # addresses
TABLE_BYTES = 8 << 20
MOST_CAPTURED = TABLE_BYTES // (8 * _LONGEST_ROW) - 1  # the first row is that of calls outside of captures


class Workspace:
    """Signals, sums of parts and the message of this rank, and a state of the library for them.

    Args:
        operators: of the library.
        rank: this rank.
        memory: uint8 of this rank, zeros, of `bytes_for` or more.
        addresses: of the memory of each rank, in this process.

    Attributes:
        message: address of this rank's message.
        message_bytes: its size.
    """

    def __init__(self, operators: Operators, rank: int, memory: Tensor, addresses: Sequence[int]) -> None:
        signals = _signal_bytes(operators)
        self.message_bytes = (memory.numel() - signals) // 2 // _ALIGNMENT * _ALIGNMENT
        messages = [address + signals + self.message_bytes for address in addresses]  # behind the sums of parts
        self.message = messages[rank]
        row = [*messages, *[0] * (_ROW - len(messages))]
        self._memory = memory
        one = torch.tensor(row, dtype=torch.int64, device=memory.device)
        self._table = one.repeat(TABLE_BYTES // (8 * _ROW))
        self._captured = 0
        self.state = operators.init_custom_ar(list(addresses), self._table.view(torch.uint8), rank, True)
        operators.register_buffer(self.state, messages)
        weakref.finalize(self, operators.dispose, self.state).atexit = False

    def count_captured(self) -> None:
        """Raise an error where the table would end."""
        if self._captured >= MOST_CAPTURED:
            raise KernelUnavailable(
                f"graphs of this process have captured {MOST_CAPTURED} sums by vLLM's all-reduce, and there are no "
                "addresses for more; select another kernel for further graphs, e.g. backend='torch.symm_mem_two_shot'"
            )
        self._captured += 1


def bytes_for(operators: Operators, message_bytes: int) -> int:
    """Bytes of each rank for messages of this size."""
    return _signal_bytes(operators) + 2 * (-(-message_bytes // _ALIGNMENT) * _ALIGNMENT)


def _signal_bytes(operators: Operators) -> int:
    return -(-int(operators.meta_size()) // _ALIGNMENT) * _ALIGNMENT


_made: weakref.WeakKeyDictionary[symmetric.Workspace, Workspace] = weakref.WeakKeyDictionary()


class OfVllm(AllReduceAdapter):
    """vLLM's library."""

    library: ClassVar[Library] = VLLM
    purpose: ClassVar[str] = "custom_all_reduce.vllm"

    def __init__(self, problem: CollectiveProblem) -> None:
        super().__init__(problem)
        self._operators = operators_of(self.library, problem.device.capability)
        self._bytes = MESSAGE_BYTES[problem.message]
        self._connected: OfGroups[Workspace] = OfGroups()

    def connect(self, x: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        device, size = x.device, bytes_for(self._operators, self._bytes)
        shared = symmetric.rendezvoused(group, device, size, self.purpose, timeout_s)
        made = _made.get(shared)
        if made is None:
            bases = list(shared.handle.buffer_ptrs)
            begin = shared.buffer.data_ptr() - bases[shared.rank]  # newer allocators place buffers in larger blocks
            with torch.cuda.device(device):
                made = Workspace(self._operators, shared.rank, shared.buffer, [base + begin for base in bases])
            torch.cuda.synchronize(device)
            meet(self.purpose, group, {"op": self.purpose, "step": "addresses are registered"}, timeout_s)
            _made[shared] = made
        self._connected.keep(group, made)
        few = torch.ones(1024, dtype=x.dtype, device=device)  # loads the code, which a capture cannot do
        self.launch(few, few, group, timeout_s)
        # The operators do not check that a kernel started, e.g. that the library was compiled for the device.
        if not bool((few == group.size()).all()):
            raise KernelUnavailable(
                f"the all-reduce of {self.library.package} gave {few[0].item()} as the sum of {group.size()} ones; "
                "select another kernel, and report it"
            )

    def launch(self, x: Tensor, out: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        if not x.numel():
            return  # on all ranks
        workspace = self._connected.get(group) or self._workspace_before(group)
        whole = not x.nbytes % _UNIT
        source = x if is_row_major(x) and whole else _padded(x)
        target = out if is_row_major(out) and whole else source.new_empty(source.shape)
        with on_device_of(x):
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                workspace.count_captured()
            self._operators.all_reduce(workspace.state, source, target, workspace.message, workspace.message_bytes)
        if target is not out:
            out.copy_(target.view(-1)[: out.numel()].view(out.shape))

    def _workspace_before(self, group: ProcessGroup) -> Workspace:
        """The workspace that another plan of the group has made."""
        shared = symmetric.workspace_of(group, self.purpose, bytes_for(self._operators, self._bytes))
        made = _made.get(shared)
        if made is None:
            raise KernelUnavailable(
                f"{self.purpose}: no plan has connected the group {group.group_name!r}: call prepare again"
            )
        return self._connected.keep(group, made)


class OfSgl(OfVllm):
    """SGLang's library."""

    library = SGL
    purpose = "custom_all_reduce.sgl_kernel"


def _padded(x: Tensor) -> Tensor:
    """A copy of whole units of 16 bytes; nothing reads the padding, which is garbage."""
    if not x.nbytes % _UNIT:
        return contiguous_copy(x)
    made = x.new_empty(-(-x.nbytes // _UNIT) * _UNIT // x.itemsize)
    made[: x.numel()].view(x.shape).copy_(x)
    return made
