"""Norms and activations whose result is quantised at once: every form, rows kept in registers and wider ones."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernelhub.backends.triton.fused_quant.adapter import Activation, Norm
from kernelhub.ops.fused_quant.formats import GIVEN, Results
from kernelhub.ops.fused_quant.problem import FORMATS, ActivationProblem, NormProblem
from kernelhub.probes.device import DeviceFacts
from tests.backends.ahead.case import Case

_ROWS = 64


def _operands(op: str, problem: Any) -> tuple[Any, ...]:
    """Rows of the result's width, the given scale, and the results."""
    x = torch.empty(_ROWS, problem.width, dtype=getattr(torch, problem.dtype), device="cuda")
    given = torch.empty(1, device="cuda") if problem.format in GIVEN else None
    return (x, given, *Results(op, problem, 0).completed(x, tuple(x.shape), None, None))


def _norm(facets: dict[str, Any], device: DeviceFacts) -> None:
    problem = NormProblem(device=device, **facets)
    x, given, out, scale = _operands("rms_norm_quant", problem)
    weight = torch.empty(problem.width, dtype=getattr(torch, problem.weight_dtype), device="cuda")
    residual, sums = (torch.empty_like(x), torch.empty_like(x)) if problem.residual else (None, None)
    Norm(problem).launch(x, weight, 1e-6, residual, given, out, scale, sums)


def _activation(facets: dict[str, Any], device: DeviceFacts) -> None:
    problem = ActivationProblem(device=device, **facets)
    _, given, out, scale = _operands("silu_and_mul_quant", problem)
    x = torch.empty(_ROWS, 2 * problem.width, dtype=getattr(torch, problem.dtype), device="cuda")
    Activation(problem).launch(x, given, out, scale)


CASES = [
    *(
        Case(
            f"norm to {format}, {width} wide",
            functools.partial(_norm, {"format": format, "width": width, "residual": True}),
        )
        for format in FORMATS
        for width in (4096, 7168, 16384)
    ),
    *(
        Case(f"silu to {format}, {width} wide", functools.partial(_activation, {"format": format, "width": width}))
        for format in FORMATS
        for width in (2048, 18432)
    ),
]
