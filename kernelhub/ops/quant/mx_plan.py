"""Plans of the MX formats, which differ in the op only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.hub import Bound
from kernelhub.dispatch.plan import Plan, traced_as


class QuantizeMxPlan(Plan):
    """A kernel chosen for tensors like this: ``run(x, out=None, out_scale=None)`` is a whole call."""

    def __init__(self, bound: Bound, op: Any) -> None:
        direct, kernel = bound.run, bound.selection.selected
        rounding = "up" if bound.selection.problem.round_up else "floor"

        def run(x: Tensor, out: Tensor | None = None, out_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
            result: tuple[Tensor, Tensor] = direct(x, out, out_scale)
            return result

        def traced(x: Tensor, out: Tensor | None = None, out_scale: Tensor | None = None) -> Any:
            return op(x, rounding, out, out_scale, kernel)

        super().__init__(bound, traced_as(run, traced))


class DequantizeMxPlan(Plan):
    """A kernel chosen for codes like these: ``run(x, scale, out=None)`` is a whole call."""

    def __init__(self, bound: Bound, op: Any) -> None:
        direct, kernel = bound.run, bound.selection.selected
        out_dtype = getattr(torch, bound.selection.problem.out_dtype)

        def run(x: Tensor, scale: Tensor, out: Tensor | None = None) -> Tensor:
            result: Tensor = direct(x, scale, None, out)
            return result

        def traced(x: Tensor, scale: Tensor, out: Tensor | None = None) -> Any:
            return op(x, scale, out_dtype, out, kernel)

        super().__init__(bound, traced_as(run, traced))
