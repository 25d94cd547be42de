"""`all_reduce_rms_norm` with a format, by the kernels that are selected for `all_reduce` and `rms_norm_quant`."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernelhub.backends.comm_pairs.kernels import parts_of
from kernelhub.backends.shared.repeat import Repeated, identified
from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.hub import HUB
from kernelhub.ops.arguments import describe
from kernelhub.ops.comm.adapter import AllReduceRmsNormAdapter
from kernelhub.ops.comm.cpu_ranks import compare
from kernelhub.ops.comm.problem import AllReduceRmsNormProblem
from kernelhub.ops.fused_quant.formats import GIVEN, fresh
from kernelhub.ops.known_calls import is_repeated
from kernelhub.ops.quant.arguments import any_rows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class SumThenQuant(AllReduceRmsNormAdapter):
    """The sum into the place of the new residual where that is free, then residual, norm and quantisation.

    The adapters of the parts get the call at once: what their ops would check holds for what this op has checked. If
    both repeat their launches, calls that come again make those of both in one entry into the launcher.
    """

    problem: AllReduceRmsNormProblem

    def __init__(self, problem: AllReduceRmsNormProblem) -> None:
        super().__init__(problem)
        self._repeated: weakref.WeakKeyDictionary[Any, Repeated] = weakref.WeakKeyDictionary()  # by group

    def made_of(self, device: int) -> tuple[Bound, ...]:
        if not self.part_bounds:
            needs = parts_of(self.problem)
            self.part_bounds[:] = [HUB.function(op).op.bound_for(need, device, None) for op, need in needs]
        return tuple(self.part_bounds)

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
        problem = self.problem
        if problem.device.type == "cpu":  # the sum compares x, but neither op nor eps
            what = f"x {describe(x)}, eps {eps}, format {problem.format}"
            compare("all_reduce_rms_norm", what, group, timeout_s)
        total, norm = (part.adapter for part in self.made_of(x.get_device()))
        given = (x, residual, weight, out, residual_out, given_scale, scale)
        arguments = (total, norm, *given, eps, group, timeout_s)
        if is_repeated(total) and is_repeated(norm):
            of_group = self._repeated.get(group)
            if of_group is None:
                of_group = self._repeated.setdefault(group, Repeated())
            of_group.run(*identified((x.shape, eps, timeout_s), *given), _launch_anew, *arguments)
        else:
            _launch_anew(*arguments)

    def repeated(
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
    ) -> Any:
        of_group = self._repeated.get(group)
        given = (x, residual, weight, out, residual_out, given_scale, scale)
        return of_group and of_group.sequence_of(*identified((x.shape, eps, timeout_s), *given))


def _launch_anew(
    total: Any,
    norm: Any,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    out: Tensor,
    residual_out: Tensor,
    given_scale: Tensor | None,
    scale: Tensor | None,
    eps: float,
    group: ProcessGroup,
    timeout_s: float,
) -> None:
    """Both launches, by the adapters of the sum and of the norm."""
    added = residual_out if residual_out.is_contiguous() else x.new_empty(x.shape)
    # The norm reads the residual after the sum is there.
    place = x.new_empty(x.shape) if added.data_ptr() == residual.data_ptr() else added
    total.launch(x, place, group, timeout_s)
    if x.numel():
        rows, before, after = (any_rows(one, False) for one in (place, residual, added))
        norm.launch(rows, weight, eps, before, given_scale, out, scale, after)
    if added is not residual_out:
        residual_out.copy_(added)
