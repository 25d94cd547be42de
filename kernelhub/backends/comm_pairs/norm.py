"""`all_reduce_rms_norm` with a format, by the kernels that are selected for `all_reduce` and `rms_norm_quant`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernelhub.backends.comm_pairs.kernels import parts_of
from kernelhub.backends.shared.cpu_ranks import compare
from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.hub import HUB
from kernelhub.ops.arguments import describe
from kernelhub.ops.comm.adapter import AllReduceRmsNormAdapter
from kernelhub.ops.comm.problem import AllReduceRmsNormProblem
from kernelhub.ops.fused_quant.formats import GIVEN, fresh
from kernelhub.ops.fused_quant.problem import FP8_TENSOR

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class SumThenQuant(AllReduceRmsNormAdapter):
    """The sum into the place of the new residual where that is free, then residual, norm and quantisation."""

    problem: AllReduceRmsNormProblem

    def __init__(self, problem: AllReduceRmsNormProblem) -> None:
        super().__init__(problem)
        self._parts: tuple[Bound, ...] = ()

    def made_of(self, device: int) -> tuple[Bound, ...]:
        if not self._parts:
            needs = parts_of(self.problem)
            self._parts = tuple(HUB.function(op).op.bound_for(need, device, None) for op, need in needs)
        return self._parts

    def connect(self, x: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        total, norm = self.made_of(x.get_device())
        total.adapter.connect(x, group, timeout_s)
        self._compile(norm, x)

    def _compile(self, norm: Bound, like: Tensor) -> None:
        """Launch the norm of a row of zeros, so that no run compiles it."""
        problem = self.problem
        row, residual = (like.new_zeros(1, problem.hidden_size) for _ in range(2))  # aligned, as in most calls
        weight = row[0].to(getattr(torch, problem.weight_dtype))
        given = row.new_ones(1, dtype=torch.float32) if problem.format in GIVEN else None
        made = fresh(row, row.shape, problem.format, getattr(torch, problem.scale_dtype), problem.column)
        norm.adapter.launch(row, weight, 1e-6, residual, given, made["out"], made.get("out_scale"), residual)

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
        form = self.problem.format
        if x.is_cpu:  # the sum compares x, but neither op nor eps
            compare("all_reduce_rms_norm", f"x {describe(x)}, eps {eps}, format {form}", group, timeout_s)
        total, norm = self.made_of(x.get_device())
        added = residual_out if residual_out.is_contiguous() else x.new_empty(x.shape)
        # The norm reads the residual after the sum is there.
        place = x.new_empty(x.shape) if added.data_ptr() == residual.data_ptr() else added
        total.run(x, group, place)
        rows = (out.shape[0], x.shape[-1])
        scales = (given_scale, None) if form == FP8_TENSOR else (None, given_scale)
        norm.run(place.view(rows), weight, eps, residual.reshape(rows), *scales, out, scale, added.view(rows))
        if added is not residual_out:
            residual_out.copy_(added)
