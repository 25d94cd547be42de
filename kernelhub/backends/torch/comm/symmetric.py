"""`all_reduce` by torch's kernels over symmetric memory: one-shot and two-shot, without NVLink multicast.

A call copies `x` into the workspace of this rank. In one shot each rank reads the workspaces of all ranks and adds all
elements. In two shots it adds its share of the elements, and then reads the shares of the others. Both add in the order
of ranks, so that all ranks get equal bits. The kernels wait for other ranks without limit.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kernelhub.backends.shared.symmetric import Workspace, rendezvoused, workspace_of
from kernelhub.ops.comm.adapter import AllReduceAdapter
from kernelhub.ops.comm.group import OfGroups
from kernelhub.ops.comm.problem import MESSAGE_BYTES, CollectiveProblem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_VECTOR_BYTES = 16  # of one access; a share of a rank is a multiple of it
_MOST_VIEWS = 512


class _Staged(AllReduceAdapter):
    """Copies `x` to the workspace, padded to what the kernel divides. Nothing reads the padding, which is garbage."""

    purpose: ClassVar[str]

    def __init__(self, problem: CollectiveProblem) -> None:
        super().__init__(problem)
        self._views: OfGroups[tuple[Tensor, Tensor]] = OfGroups()
        self._connected: OfGroups[Workspace] = OfGroups()

    def connect(self, x: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        device, size = x.device, MESSAGE_BYTES[self.problem.message]
        self._connected.keep(group, rendezvoused(group, device, size, self.purpose, timeout_s))
        self._views.clear()
        for count in (8, 1024):  # loads the code of an aligned and of a padded message, which a capture cannot do
            few = torch.zeros(count, dtype=x.dtype, device=device)
            type(self).launch(self, few, few, group, timeout_s)
        torch.cuda.current_stream(device).synchronize()

    def launch(self, x: Tensor, out: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        if not x.numel():
            return  # on all ranks
        name = group.group_name
        views = self._views.get(group, x.shape)
        if views is None:
            views = self._view(x, group)
        padded, staged = views
        staged.copy_(x)
        if padded.numel() == staged.numel() and out.is_contiguous() and not out.data_ptr() % _VECTOR_BYTES:
            self.reduce_to(staged, name, out)
        else:
            out.copy_(self.reduced(padded, name)[: staged.numel()].view(x.shape))

    def _view(self, x: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
        """The padded message in the workspace, and the part of it that has the shape of `x`."""
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        workspace = self._connected.get(group) or workspace_of(group, self.purpose, MESSAGE_BYTES[self.problem.message])
        buffer = workspace.buffer
        step = self.share_bytes(group.size())
        padded = buffer[: -(-x.nbytes // step) * step].view(x.dtype)
        return self._views.keep(group, (padded, padded[: x.numel()].view(x.shape)), x.shape)

    @abc.abstractmethod
    def share_bytes(self, world_size: int) -> int:
        """Bytes that the kernel divides a message by."""

    @abc.abstractmethod
    def reduce_to(self, staged: Tensor, name: str, out: Tensor) -> None:
        """Sum the workspaces of all ranks into contiguous memory of the same shape."""

    @abc.abstractmethod
    def reduced(self, padded: Tensor, name: str) -> Tensor:
        """The sum of the workspaces of all ranks, as a row."""


class OneShot(_Staged):
    """Each rank adds all elements."""

    purpose = "torch.symm_mem_one_shot"

    def share_bytes(self, world_size: int) -> int:
        return _VECTOR_BYTES

    def reduce_to(self, staged: Tensor, name: str, out: Tensor) -> None:
        torch.ops.symm_mem.one_shot_all_reduce_out(staged, "sum", name, out)

    def reduced(self, padded: Tensor, name: str) -> Tensor:
        result: Tensor = torch.ops.symm_mem.one_shot_all_reduce(padded, "sum", name)
        return result


class TwoShot(_Staged):
    """Each rank adds its share of the elements."""

    purpose = "torch.symm_mem_two_shot"

    def share_bytes(self, world_size: int) -> int:
        return _VECTOR_BYTES * world_size

    def reduce_to(self, staged: Tensor, name: str, out: Tensor) -> None:
        torch.ops.symm_mem.two_shot_all_reduce_out(staged, "sum", name, out)

    def reduced(self, padded: Tensor, name: str) -> Tensor:
        result: Tensor = torch.ops.symm_mem.two_shot_all_reduce_(padded, "sum", name)
        return result
