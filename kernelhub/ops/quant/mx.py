"""What the ops of the MX formats share: their contracts and plans, which differ in names and references only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from kernelhub.dispatch.contract import Contract, OpRecord
from kernelhub.dispatch.op import Op
from kernelhub.ops.call_plan import CallPlan, Fixed
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


class QuantizeMxPlan(CallPlan):
    """A kernel chosen for tensors like this: ``run(x, out=None, out_scale=None)`` is a whole call."""

    __slots__ = ()
    call = "x, out, out_scale"
    fixed: ClassVar[Fixed] = {"scale_rounding": lambda problem: "up" if problem.round_up else "floor"}


class DequantizeMxPlan(CallPlan):
    """A kernel chosen for codes like these: ``run(x, scale, out=None)`` is a whole call."""

    __slots__ = ()
    call = "x, scale, None, out"
    fixed: ClassVar[Fixed] = {"out_dtype": lambda problem: getattr(torch, problem.out_dtype)}
