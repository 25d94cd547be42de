"""`rms_norm_quant` and `silu_and_mul_quant` by operators of torch, a block of rows at a time on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.fused_quant.adapter import ActivationAdapter, NormAdapter
from kernelhub.ops.fused_quant.problem import NONE
from kernelhub.ops.fused_quant.reference import activated, added, limited, normalised, quantised
from kernelhub.ops.precision import without_autocast

_ELEMENTS = 1 << 18  # of a block, 1 MB in float32


def fill(
    problem: Any,
    width: int,
    rows: int,
    row_of: Callable[[slice], Tensor],
    given: Tensor | None,
    out: Tensor,
    scale: Tensor | None,
) -> None:
    """Write the results of all rows; `row_of` computes some in float32. `problem` has the form as a `FusedProblem`."""
    step = max(1, _ELEMENTS // width) if out.device.type == "cpu" else max(1, rows)
    for start in range(0, rows, step):
        block = slice(start, start + step)
        y = row_of(block)
        if problem.format == NONE:
            out[block] = y.to(out.dtype)
            continue
        dtype = getattr(torch, problem.dtype)
        scale_dtype = getattr(torch, problem.scale_dtype)
        codes, made = quantised(limited(y, dtype), problem.format, given, problem.ue8m0, scale_dtype)
        _bytes(out)[block] = _bytes(codes)
        if scale is not None and made is not None:
            _bytes(scale)[block] = _bytes(made)


def _bytes(tensor: Tensor) -> Tensor:
    """Formats of one byte as uint8, into which every torch can index."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


class Norm(NormAdapter):
    """`rms_norm_quant` anywhere."""

    @without_autocast
    def launch(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        residual: Tensor | None,
        given_scale: Tensor | None,
        out: Tensor,
        scale: Tensor | None,
        residual_out: Tensor | None,
    ) -> None:
        def row_of(block: slice) -> Tensor:
            total = added(x[block], None if residual is None else residual[block])
            if residual_out is not None:
                residual_out[block] = total
            return normalised(total, weight, eps, self.problem.unit_offset)

        fill(self.problem, self.problem.width, x.shape[0], row_of, given_scale, out, scale)


class Activation(ActivationAdapter):
    """`silu_and_mul_quant` anywhere."""

    @without_autocast
    def launch(self, x: Tensor, given_scale: Tensor | None, out: Tensor, scale: Tensor | None) -> None:
        fill(self.problem, self.problem.width, x.shape[0], lambda block: activated(x[block]), given_scale, out, scale)
