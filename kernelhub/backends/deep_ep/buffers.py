"""DeepEP's buffers: one for each group, made when a plan connects its ranks.

A buffer is memory of each GPU that the others map by CUDA IPC. It is kept until the process ends: freeing it is a
barrier of all ranks, which no finaliser may wait for. One that is too small for a later plan is replaced.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from deep_ep import Buffer

from kernelhub.errors import KernelUnavailable
from kernelhub.ops.comm.group import meet

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PURPOSE = "deep_ep"


@dataclass(frozen=True, eq=False)
class Exchange:
    """A buffer, and how its kernels are launched.

    Attributes:
        buffer: deep_ep.Buffer of this rank.
        row_bytes: largest row that it holds.
        channels: channels of a launch, one for each two SMs; a combine has those of its dispatch.
        dispatch, combine: deep_ep's configurations for the number of ranks.
    """

    buffer: Any
    row_bytes: int
    channels: int
    dispatch: Any
    combine: Any


_exchanges: dict[str, tuple[weakref.ref[Any], list[Exchange]]] = {}


def connected(group: ProcessGroup, device: torch.device, row_bytes: int, timeout_s: float) -> Exchange:
    """The exchange of a group for rows of at least this size; all ranks call it, in the same order.

    Raises:
        RanksDisagree: a rank gives another size, has another number of SMs for the kernels, or is missing.
    """
    owner, made = _exchanges.get(group.group_name, (None, []))
    if owner is None or owner() is not group:
        made = []
    if made and made[-1].row_bytes >= row_bytes:
        return made[-1]
    size = group.size()
    with torch.cuda.device(device):
        configs = Buffer.get_dispatch_config(size), Buffer.get_combine_config(size)
        num_bytes = max(config.get_nvl_buffer_size_hint(row_bytes, size) for config in configs)
        statement = {"op": PURPOSE, "step": "buffer", "bytes": num_bytes, "SMs": Buffer.num_sms}
        meet(PURPOSE, group, statement, timeout_s)
        buffer = Buffer(group, num_nvl_bytes=num_bytes, explicitly_destroy=True)
    exchange = Exchange(buffer, row_bytes, Buffer.num_sms // 2, *configs)
    _exchanges[group.group_name] = (weakref.ref(group), [*made, exchange])
    return exchange


def exchange_of(group: ProcessGroup, row_bytes: int) -> Exchange:
    """The exchange that `connected` gave last.

    Raises:
        KernelUnavailable: there is none for rows of this size.
    """
    kept = _exchanges.get(group.group_name)
    if kept is None or kept[0]() is not group or kept[1][-1].row_bytes < row_bytes:
        raise KernelUnavailable(
            f"{PURPOSE} has no buffer for rows of {row_bytes} bytes in the group {group.group_name!r}: call the op's "
            "prepare on every rank, with the same backend= and settings as this call, before the first call"
        )
    return kept[1][-1]
