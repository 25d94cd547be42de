"""`all_reduce` and `all_reduce_rms_norm` by TensorRT-LLM's kernels in FlashInfer.

One shot sends the message to all ranks and waits until no slot is empty, so that it needs no barrier. Two shots copy
the message to the workspace, wait at a barrier of all ranks, add up a part of the rows, and wait again. Launches are
not programmatic (PDL): the next kernel on the stream starts when this one is done.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from flashinfer.comm.trtllm_ar import get_trtllm_comm_module, trtllm_allreduce_fusion
from torch import Tensor

from kernelhub.backends.flashinfer.calls import ALL_REDUCE_OPERANDS
from kernelhub.backends.flashinfer.comm.rows import UNIT, rows_of
from kernelhub.backends.flashinfer.comm.workspace import (
    ONE_SHOT,
    TWO_SHOT,
    Workspace,
    workspace_before,
    workspace_for,
)
from kernelhub.backends.shared.operands import contiguous_copy, is_row_major, on_device_of
from kernelhub.ops.comm.adapter import AllReduceAdapter, AllReduceRmsNormAdapter
from kernelhub.ops.comm.group import OfGroups
from kernelhub.ops.comm.problem import MESSAGE_BYTES, AllReduceRmsNormProblem, CollectiveProblem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SUM, _SUM_RESIDUAL_NORM = 0, 1  # AllReduceFusionPattern.kAllReduce, kARResidualRMSNorm
_ABSENT: dict[str, Any] = dict.fromkeys(ALL_REDUCE_OPERANDS)
_run = inspect.unwrap(trtllm_allreduce_fusion)  # it is marked as deprecated, which warns at each call


class _Kernel:
    """One of the two kernels over the workspaces of the groups that an adapter serves.

    Args:
        purpose: `ONE_SHOT` or `TWO_SHOT`.
        world_size: ranks of a group.
        message_bytes: most bytes of a call.
    """

    def __init__(self, purpose: str, world_size: int, message_bytes: int) -> None:
        self.purpose, self.message_bytes = purpose, message_bytes
        self.least_rows = world_size + 1 if purpose == TWO_SHOT else 1  # the library asserts it
        self.connected: OfGroups[Workspace] = OfGroups()

    def connect(self, group: ProcessGroup, device: torch.device, timeout_s: float) -> None:
        """Compile or load the code, while no rank waits for another on its GPU; then make the workspace."""
        get_trtllm_comm_module()
        made = workspace_for(self.purpose, group, device, self.message_bytes, timeout_s)
        self.connected.keep(group, made)

    def __call__(self, group: ProcessGroup, pattern: int, source: Tensor, **operands: Any) -> None:
        """Launch on contiguous tensors ``[rows, columns]`` on 16 bytes."""
        workspace = self.connected.get(group)
        if workspace is None:
            workspace = self.connected.keep(group, workspace_before(self.purpose, group, self.message_bytes))
        given = _ABSENT | operands
        with on_device_of(source):
            _run(
                allreduce_in=source,
                world_size=workspace.world_size,
                world_rank=workspace.rank,
                token_num=source.shape[0],
                hidden_dim=source.shape[1],
                workspace_ptrs=workspace.table,
                launch_with_pdl=False,
                trigger_completion_at_end=True,
                fp32_acc=True,
                pattern_code=pattern,
                use_oneshot=self.purpose == ONE_SHOT,
                **given,
            )


class OneShot(AllReduceAdapter):
    """Each rank adds all elements."""

    purpose = ONE_SHOT

    def __init__(self, problem: CollectiveProblem) -> None:
        super().__init__(problem)
        self._kernel = _Kernel(self.purpose, problem.world_size, MESSAGE_BYTES[problem.message])

    def connect(self, x: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        self._kernel.connect(group, x.device, timeout_s)
        few = torch.zeros(1, dtype=x.dtype, device=x.device)  # loads the code, which a capture cannot do
        self.launch(few, few, group, timeout_s)
        torch.cuda.current_stream(x.device).synchronize()

    def launch(self, x: Tensor, out: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        count = x.numel()
        if not count:
            return  # on all ranks
        rows, units = rows_of(x.nbytes, self._kernel.least_rows)
        columns = units * UNIT // x.itemsize
        if rows * columns == count:
            source = x if is_row_major(x) else contiguous_copy(x)
            target = out if is_row_major(out) else out.new_empty(out.shape)
        else:  # nothing reads the rest, which is garbage
            source = x.new_empty(rows * columns)
            source[:count].view(x.shape).copy_(x)
            target = source
        self._kernel(group, _SUM, source.view(rows, columns), allreduce_out=target.view(rows, columns))
        if target is not out:
            out.copy_(target.view(-1)[:count].view(out.shape))


class TwoShot(OneShot):
    """Each rank adds some of the rows."""

    purpose = TWO_SHOT


class OneShotRmsNorm(AllReduceRmsNormAdapter):
    """Sum, residual and norm in one launch; each rank adds all elements."""

    purpose = ONE_SHOT
    problem: AllReduceRmsNormProblem

    def __init__(self, problem: AllReduceRmsNormProblem) -> None:
        super().__init__(problem)
        row_bytes = problem.hidden_size * getattr(torch, problem.dtype).itemsize
        self._kernel = _Kernel(self.purpose, problem.world_size, MESSAGE_BYTES[problem.message])
        self._kernel.message_bytes = max(self._kernel.message_bytes, self._kernel.least_rows * row_bytes)

    def connect(self, x: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        self._kernel.connect(group, x.device, timeout_s)
        row = torch.zeros(1, self.problem.hidden_size, dtype=x.dtype, device=x.device)
        self.launch(row, row.clone(), row[0].clone(), 1.0, row.clone(), row.clone(), group, timeout_s)
        torch.cuda.current_stream(x.device).synchronize()

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
        if not x.numel():
            return  # on all ranks
        columns = self.problem.hidden_size
        rows = x.numel() // columns
        most = max(rows, self._kernel.least_rows)
        sources = [self._source(tensor, rows, most) for tensor in (x, residual)]
        targets = [
            tensor.view(rows, columns) if most == rows and is_row_major(tensor) else tensor.new_empty(most, columns)
            for tensor in (residual_out, out)
        ]
        self._kernel(
            group,
            _SUM_RESIDUAL_NORM,
            sources[0],
            residual_in=sources[1],
            residual_out=targets[0],
            norm_out=targets[1],
            rms_gamma=weight if is_row_major(weight) else contiguous_copy(weight),
            rms_eps=eps,
        )
        for tensor, target in zip((residual_out, out), targets, strict=True):
            if target.data_ptr() != tensor.data_ptr():
                tensor.copy_(target[:rows].view(tensor.shape))

    def _source(self, tensor: Tensor, rows: int, most: int) -> Tensor:
        """A tensor as rows; rows beyond its own are garbage, and so are theirs of the result."""
        columns = self.problem.hidden_size
        if most == rows:
            return (tensor if is_row_major(tensor) else contiguous_copy(tensor)).view(rows, columns)
        padded = tensor.new_empty(most, columns)
        padded[:rows].view(tensor.shape).copy_(tensor)
        return padded


class TwoShotRmsNorm(OneShotRmsNorm):
    """Sum, residual and norm in one launch; each rank adds some of the rows."""

    purpose = TWO_SHOT
