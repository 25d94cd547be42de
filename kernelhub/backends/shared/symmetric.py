"""Workspaces that all ranks of a group can access: torch's symmetric memory, without NVLink multicast.

`connect` of an adapter makes a workspace, together with all ranks; `launch` looks it up. A workspace is kept until its
group is gone, since captured graphs may use it: one that is too small is replaced and not freed. Each kernel has
workspaces of its own, named by `purpose`, and uses them on one stream at a time.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernelhub.errors import KernelUnavailable
from kernelhub.ops.comm.group import meet

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_WITHOUT_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


@dataclass(frozen=True, eq=False)
class Workspace:
    """Memory of this rank that the other ranks can access, and access to theirs.

    Attributes:
        buffer: uint8, of this rank, on its device.
        handle: torch's handle: ``buffer_ptrs_dev``, ``signal_pad_ptrs_dev``, ``get_buffer``, ``barrier``.
        group_name: name of the group.
        rank: this rank.
        world_size: ranks of the group.
    """

    buffer: Tensor
    handle: Any
    group_name: str
    rank: int
    world_size: int

    @property
    def num_bytes(self) -> int:
        """Bytes of each rank."""
        return self.buffer.numel()


_workspaces: dict[tuple[str, str], tuple[weakref.ref[Any], list[Workspace]]] = {}


def rendezvoused(
    group: ProcessGroup, device: torch.device, num_bytes: int, purpose: str, timeout_s: float
) -> Workspace:
    """The workspace of a group for a purpose, with at least this size; all ranks call it, in the same order.

    It contains zeros on all ranks when it is made.

    Raises:
        RanksDisagree: a rank cannot allocate it, gives another size, or is missing.
        RuntimeError: the ranks cannot exchange their handles.
    """
    key = (group.group_name, purpose)
    owner, made = _workspaces.get(key, (None, []))
    if owner is None or owner() is not group:
        made = []
    if made and made[-1].num_bytes >= num_bytes and made[-1].buffer.device == device:
        return made[-1]
    from torch.distributed import _symmetric_memory as symmetric

    with torch.cuda.device(device), _without_multicast():
        buffer = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        buffer.zero_()
        torch.cuda.current_stream(device).synchronize()
        meet(purpose, group, {"op": purpose, "step": "workspace", "bytes": num_bytes}, timeout_s)
        handle = symmetric.rendezvous(buffer, group)
    workspace = Workspace(buffer, handle, group.group_name, group.rank(), group.size())
    _forget_groups_that_are_gone()
    _workspaces[key] = (weakref.ref(group), [*made, workspace])
    return workspace


def workspace_of(group: ProcessGroup, purpose: str, num_bytes: int = 0) -> Workspace:
    """The workspace that `rendezvoused` made last.

    Raises:
        KernelUnavailable: there is none, or it is smaller than `num_bytes`.
    """
    kept = _workspaces.get((group.group_name, purpose))
    if kept is None or kept[0]() is not group or kept[1][-1].num_bytes < num_bytes:
        raise KernelUnavailable(
            f"{purpose} has no workspace in the group {group.group_name!r}: call the op's prepare on every rank, with "
            "the same backend= and settings as this call, before the first call"
        )
    return kept[1][-1]


def _forget_groups_that_are_gone() -> None:
    for key in [key for key, (owner, _) in _workspaces.items() if owner() is None]:
        del _workspaces[key]


@contextlib.contextmanager
def _without_multicast() -> Iterator[None]:
    """Creating a multicast object can hang where one GPU cannot join (pytorch#195596), and no kernel here uses it."""
    before = os.environ.get(_WITHOUT_MULTICAST)
    os.environ[_WITHOUT_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_WITHOUT_MULTICAST]
        else:
            os.environ[_WITHOUT_MULTICAST] = before
