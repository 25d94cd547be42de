"""Collectives of torch.distributed: those of the group's own backend.

On a CPU a call waits for the result, at most for the time-out. On a GPU it is queued on the current stream, and the
watchdog of NCCL ends ranks that wait for longer than the time-out of the group.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from torch import Tensor

from kernelhub.ops.comm.adapter import AllReduceAdapter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class AllReduce(AllReduceAdapter):
    """`all_reduce` by the backend of the group, in place in a contiguous tensor."""

    def launch(self, x: Tensor, out: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        whole = out if out.is_contiguous() else x.contiguous()
        if whole.data_ptr() == x.data_ptr() and whole is not out:
            whole = whole.clone()
        elif whole is out and out is not x:
            out.copy_(x)
        work = group.allreduce([whole])
        if out.device.type != "cpu":
            work.wait()
        else:
            try:
                work.wait(timedelta(seconds=timeout_s))
            except RuntimeError as error:
                raise RuntimeError(
                    f"all_reduce: a rank of the group of {group.size()} is dead, or did not join rank {group.rank()} "
                    f"within {timeout_s:g} s (KERNELHUB_COMM_TIMEOUT_S); restart all ranks: {error}"
                ) from error
        if whole is not out:
            out.copy_(whole)
