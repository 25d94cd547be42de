"""Exchange of bytes between ranks: what the collectives of experts have in common.

A row travels as its bytes, with its ids, weights and scales behind it, so that one collective moves all of it, in any
dtype and with every backend of torch.distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernelhub.ops.comm.cpu_ranks import wait

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_ALIGNMENT_BYTES = 16  # of each part of a row, so that its bytes are elements of any dtype


class Wire:
    """The collectives of a group's backend, with one time-out.

    Args:
        op: for messages.
        group: the group.
        timeout_s: longest wait on a CPU. On a GPU the watchdog of NCCL applies the time-out of the group.
    """

    def __init__(self, op: str, group: ProcessGroup, timeout_s: float) -> None:
        self._op, self._group, self._timeout_s = op, group, timeout_s

    def all_gather(self, part: Tensor) -> Tensor:
        """``[W, *part.shape]``: the equal parts of all ranks."""
        size = self._group.size()
        whole = part.new_empty(size * part.numel())
        if part.numel():
            self._wait(self._group._allgather_base(whole, part.flatten()), part)
        return whole.view(size, *part.shape)

    def all_to_all(
        self, rows: Tensor, received: int, to_each: Sequence[int] = (), from_each: Sequence[int] = ()
    ) -> Tensor:
        """Rows from all ranks, in their order; equally many to and from each where no numbers are given."""
        rows = rows.contiguous()  # NCCL refuses others, such as one row that was expanded to all ranks
        made = rows.new_empty((received, *rows.shape[1:]))
        self._wait(self._group.alltoall_base(made, rows, list(from_each), list(to_each)), rows)
        return made

    def reduce_scatter(self, rows: Tensor, out: Tensor) -> None:
        """Sum rows ``[W * N, H]`` over the ranks into a contiguous out ``[N, H]``.

        On a CPU every rank sums all rows: gloo of torch 2.8 has no reduce-scatter.
        """
        if not out.numel():
            return
        group: Any = self._group
        if rows.is_cpu:
            self._wait(self._group.allreduce([rows]), rows)
            out.copy_(rows.view(self._group.size(), *out.shape)[self._group.rank()])
        else:
            self._wait(group._reduce_scatter_base(out.view(-1), rows.view(-1)), rows)

    def _wait(self, work: Any, tensor: Tensor) -> None:
        if not tensor.is_cpu:
            work.wait()
            return
        wait(self._op, work, self._group, self._timeout_s)


def packed(parts: Sequence[Tensor | None], rows: int) -> Tensor:
    """Tensors ``[N, columns]`` as one of bytes, ``[rows, width]``; rows from N on hold anything."""
    given = [dense(part) for part in parts if part is not None]
    widths = [_width(part) for part in given]
    made = torch.empty((rows, sum(widths)), dtype=torch.uint8, device=given[0].device)
    begin = 0
    for part, width in zip(given, widths, strict=True):
        size = part.shape[1] * part.itemsize
        made[: part.shape[0], begin : begin + size] = part.view(torch.uint8)
        begin += width
    return made


def dense(part: Tensor) -> Tensor:
    """A tensor whose rows can be viewed as bytes; one without elements may have any strides and count as contiguous."""
    return part if part.is_contiguous() and part.stride(-1) == 1 else part.clone(memory_format=torch.contiguous_format)


def unpacked(rows: Tensor, like: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The tensors of `packed`, of the dtypes and columns of `like`, contiguous."""
    made: list[Tensor | None] = []
    begin = 0
    for part in like:
        if part is None:
            made.append(None)
            continue
        taken = rows[:, begin : begin + part.shape[1] * part.itemsize].contiguous()
        made.append(taken.view(part.dtype).view(rows.shape[0], part.shape[1]))
        begin += _width(part)
    return made


def _width(part: Tensor) -> int:
    return -(-part.shape[1] * part.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
