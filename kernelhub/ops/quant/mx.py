"""What the ops of the MX formats share: their contracts and plans, which differ in names and references only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.contract import Contract, OpRecord
from kernelhub.dispatch.op import Backend, Op
from kernelhub.dispatch.plan import Plan, traced_as
from kernelhub.ops.quant.adapter import DequantizeAdapter, QuantizeAdapter
from kernelhub.ops.quant.dequantize_call import bind_dequantize, dequantize_problem
from kernelhub.ops.quant.problem import DequantizeProblem, QuantizeMxProblem
from kernelhub.ops.quant.quantize_mx_call import bind_mx, mx_problem

_EXAMPLE = "kernelhub.ops.quant.inputs:quantize_inputs"


def quantizer(record: OpRecord[QuantizeMxProblem], reference: Callable[..., Any]) -> Op[QuantizeMxProblem]:
    """The op of a quantiser."""
    return Op(
        Contract.of(
            record,
            problem_of=mx_problem,
            adapter=QuantizeAdapter,
            bind=bind_mx(record.name),
            reference=reference,
            example=_EXAMPLE,
        )
    )


def dequantizer(record: OpRecord[DequantizeProblem], reference: Callable[..., Any]) -> Op[DequantizeProblem]:
    """The op of the way back."""
    return Op(
        Contract.of(
            record,
            problem_of=dequantize_problem,
            adapter=DequantizeAdapter,
            bind=bind_dequantize(record.name),
            reference=reference,
            example=_EXAMPLE,
        )
    )


class QuantizeMxPlan(Plan):
    """A kernel chosen for tensors like this: ``run(x, out=None, out_scale=None)`` is a whole call."""

    def __init__(self, bound: Bound, function: Callable[..., Any]) -> None:
        direct, kernel = bound.run, bound.selection.selected
        rounding = "up" if bound.selection.problem.round_up else "floor"

        def run(x: Tensor, out: Tensor | None = None, out_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
            result: tuple[Tensor, Tensor] = direct(x, out, out_scale)
            return result

        def traced(x: Tensor, out: Tensor | None = None, out_scale: Tensor | None = None) -> Any:
            return function(x, rounding, out, out_scale, kernel)

        super().__init__(bound, traced_as(run, traced))


class DequantizeMxPlan(Plan):
    """A kernel chosen for codes like these: ``run(x, scale, out=None)`` is a whole call."""

    def __init__(self, bound: Bound, function: Callable[..., Any]) -> None:
        direct, kernel = bound.run, bound.selection.selected
        out_dtype = getattr(torch, bound.selection.problem.out_dtype)

        def run(x: Tensor, scale: Tensor, out: Tensor | None = None) -> Tensor:
            result: Tensor = direct(x, scale, None, out)
            return result

        def traced(x: Tensor, scale: Tensor, out: Tensor | None = None) -> Any:
            return function(x, scale, out_dtype, out, kernel)

        super().__init__(bound, traced_as(run, traced))


def prepare_quantizer(op: Op[QuantizeMxProblem]) -> Callable[..., QuantizeMxPlan]:
    """The `prepare` of a quantiser."""

    def prepare(*args: Any, backend: Backend = None, **kwargs: Any) -> QuantizeMxPlan:
        """Choose once for a tensor like this: arguments as of the op."""
        asked = op.ask(backend, args, kwargs)
        return QuantizeMxPlan(op.bound_for(asked.key, asked.device, backend), op.function)

    return prepare


def prepare_dequantizer(op: Op[DequantizeProblem]) -> Callable[..., DequantizeMxPlan]:
    """The `prepare` of the way back."""

    def prepare(*args: Any, backend: Backend = None, **kwargs: Any) -> DequantizeMxPlan:
        """Choose once for codes like these: arguments as of the op."""
        asked = op.ask(backend, args, kwargs)
        return DequantizeMxPlan(op.bound_for(asked.key, asked.device, backend), op.function)

    return prepare
