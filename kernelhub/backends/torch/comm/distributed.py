"""Collectives of torch.distributed: those of the group's own backend.

On a CPU a call compares what all ranks give, and waits for the result, at most for the time-out. On a GPU it is queued
on the current stream, and the watchdog of NCCL ends ranks that wait for longer than the time-out of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernelhub.backends.torch.fused_quant.steps import fill
from kernelhub.ops.arguments import describe, dtype_name
from kernelhub.ops.comm.adapter import (
    AllGatherAdapter,
    AllReduceAdapter,
    AllReduceRmsNormAdapter,
    ReduceScatterAdapter,
    connect_by_sum,
)
from kernelhub.ops.comm.cpu_ranks import compare, wait
from kernelhub.ops.comm.problem import AllReduceRmsNormProblem
from kernelhub.ops.fused_quant.problem import NONE
from kernelhub.ops.fused_quant.reference import normalised

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _Connecting:
    """Connects the ranks by a sum of one element, so that no later call does."""

    def connect(self, x: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        connect_by_sum(x, group, timeout_s)


class AllReduce(_Connecting, AllReduceAdapter):
    """`all_reduce` by the backend of the group, in place in a contiguous tensor."""

    def launch(self, x: Tensor, out: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        if x.is_cpu:
            compare("all_reduce", f"x {describe(x)}", group, timeout_s)
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

    problem: AllReduceRmsNormProblem

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
        given_scale: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> None:
        if x.is_cpu:
            given = f"x {describe(x)}, eps {eps}, format {self.problem.format}"
            compare("all_reduce_rms_norm", given, group, timeout_s)
        partial = x.clone(memory_format=torch.contiguous_format)
        finish("all_reduce_rms_norm", group.allreduce([partial]), partial, group, timeout_s)
        total = partial.float() + residual.float()
        residual_out.copy_(total)
        if self.problem.format != NONE:
            rows = total.to(x.dtype).view(out.shape[0], x.shape[-1])

            def row_of(block: slice) -> Tensor:
                return normalised(rows[block], weight, eps, False)

            fill(self.problem, rows.shape[1], rows.shape[0], row_of, given_scale, out, scale)
            return
        total *= (total.square().mean(-1, keepdim=True) + eps).rsqrt()
        out.copy_(total * weight.float())


class ReduceScatter(_Connecting, ReduceScatterAdapter):
    """`reduce_scatter` by NCCL; on a CPU the sum of all rows by gloo, of which each rank keeps its part."""

    def launch(self, x: Tensor, out: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        if x.is_cpu:
            compare("reduce_scatter", f"x {describe(x)}", group, timeout_s)
            total = x.clone(memory_format=torch.contiguous_format)
            finish("reduce_scatter", group.allreduce([total]), total, group, timeout_s)
            out.copy_(total.tensor_split(group.size())[group.rank()])
            return
        if not x.numel():
            return  # on all ranks
        part = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        work = group._reduce_scatter_base(part, x.contiguous(), _options())
        finish("reduce_scatter", work, part, group, timeout_s)
        if part is not out:
            out.copy_(part)


def _options() -> Any:
    from torch.distributed import ReduceScatterOptions

    return ReduceScatterOptions()


class AllGather(_Connecting, AllGatherAdapter):
    """`all_gather` by the backend of the group, as bytes; ranks with fewer rows than others send padding."""

    def connect(self, x: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        connect_by_sum(x.new_empty(1, dtype=torch.float32), group, timeout_s)

    def launch(
        self, x: Tensor, out: Tensor, group: ProcessGroup, timeout_s: float, rows: Sequence[int] | None = None
    ) -> None:
        if x.is_cpu:
            given = f"x {describe(x)}"
            if rows is not None:
                given = f"rows {list(rows)} of {list(x.shape[1:])} {dtype_name(x.dtype)}"
            compare("all_gather", given, group, timeout_s)
        if not out.numel():
            return  # on all ranks
        size, most = group.size(), x.shape[0] if rows is None else max(rows)
        sent = x.contiguous()
        if x.shape[0] < most:
            sent = x.new_empty(most, *x.shape[1:])
            sent[: x.shape[0]] = x
        even = rows is None or min(rows) == most
        found = out if even and out.is_contiguous() else x.new_empty(size * most, *x.shape[1:])
        moved = _bytes(found)
        work = group._allgather_base(moved, _bytes(sent))
        finish("all_gather", work, moved, group, timeout_s)
        if found is out:
            return
        if even:
            out.copy_(found)
            return
        assert rows is not None
        parts = found.view(size, most, *x.shape[1:])
        for part, place, count in zip(parts, out.split(list(rows)), rows, strict=True):
            place.copy_(part[:count])


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor in a row; one of one element may have any strides."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def finish(op: str, work: Any, moved: Tensor, group: ProcessGroup, timeout_s: float) -> None:
    """Wait for a collective: on a CPU for its end, on a GPU on the current stream.

    Raises:
        RuntimeError: on a CPU, it did not end within the time-out, or a rank is dead; the message names the rank.
    """
    if moved.device.type != "cpu":
        work.wait()
        return
    wait(op, work, group, timeout_s)
