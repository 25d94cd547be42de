"""Collectives of torch.distributed: those of the group's own backend.

On a CPU a call waits for the result, at most for the time-out. On a GPU it is queued on the current stream, and the
watchdog of NCCL ends ranks that wait for longer than the time-out of the group.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernelhub.ops.comm.adapter import AllReduceAdapter, AllReduceRmsNormAdapter, connect_by_sum

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _Connecting:
    """Connects the ranks by a sum of one element, so that no later call does."""

    def connect(self, x: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        connect_by_sum(x, group, timeout_s)


class AllReduce(_Connecting, AllReduceAdapter):
    """`all_reduce` by the backend of the group, in place in a contiguous tensor."""

    def launch(self, x: Tensor, out: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        whole = out if out.is_contiguous() else x.contiguous()
        if whole.data_ptr() == x.data_ptr() and whole is not out:
            whole = whole.clone()
        elif whole is out and out is not x:
            out.copy_(x)
        finish("all_reduce", group.allreduce([whole]), whole, group, timeout_s)
        if whole is not out:
            out.copy_(whole)


class AllReduceRmsNorm(_Connecting, AllReduceRmsNormAdapter):
    """`all_reduce_rms_norm`: the sum by the backend of the group, then torch's operators in float32."""

    def launch(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        out: Tensor,
        residual_out: Tensor,
        group: ProcessGroup,
        timeout_s: float,
    ) -> None:
        partial = x.clone(memory_format=torch.contiguous_format)
        finish("all_reduce_rms_norm", group.allreduce([partial]), partial, group, timeout_s)
        total = partial.float() + residual.float()
        residual_out.copy_(total)
        total *= (total.square().mean(-1, keepdim=True) + eps).rsqrt()
        out.copy_(total * weight.float())


def finish(op: str, work: Any, moved: Tensor, group: ProcessGroup, timeout_s: float) -> None:
    """Wait for a collective: on a CPU for its end, on a GPU on the current stream.

    Raises:
        RuntimeError: on a CPU, it did not end within the time-out, or a rank is dead.
    """
    if moved.device.type != "cpu":
        work.wait()
        return
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise RuntimeError(
            f"{op}: a rank of the group of {group.size()} is dead, or did not join rank {group.rank()} "
            f"within {timeout_s:g} s (KERNELHUB_COMM_TIMEOUT_S); restart all ranks: {error}"
        ) from error
