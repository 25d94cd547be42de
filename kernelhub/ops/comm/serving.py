"""Calls of the collectives as serving makes them."""

from __future__ import annotations

import torch

from kernelhub.ops.arguments import refuse
from kernelhub.ops.comm.inputs import alone
from kernelhub.ops.comm.problem import AllGatherProblem, AllReduceProblem, AllReduceRmsNormProblem, ReduceScatterProblem
from kernelhub.ops.fused_quant.serving import form_of
from kernelhub.ops.serving import Arguments, Batch, Calls, Sizes, Values


def all_reduce_calls(problem: AllReduceProblem, sizes: Sizes, values: Values) -> Calls:
    """The partial sums of a layer's output. `sizes`: ``hidden_size``, elements of a row."""
    _check_alone("all_reduce", problem.world_size)
    width = sizes.get("hidden_size", 4096)

    def call(batch: Batch) -> Arguments:
        x = values.normal(batch.tokens, width, dtype=problem.dtype)
        return {"x": x, "group": alone(x.device)}

    return call


def all_reduce_rms_norm_calls(problem: AllReduceRmsNormProblem, sizes: Sizes, values: Values) -> Calls:
    """The partial sums of a layer's output, with the residual stream."""
    _check_alone("all_reduce_rms_norm", problem.world_size)
    width = problem.hidden_size
    weight = values.normal(width, dtype=problem.weight_dtype)
    form = form_of(problem, values)

    def call(batch: Batch) -> Arguments:
        x = values.normal(batch.tokens, width, dtype=problem.dtype)
        residual = values.normal(batch.tokens, width, dtype=problem.dtype)
        return {"x": x, "residual": residual, "weight": weight, "eps": 1e-5, "group": alone(x.device), **form}

    return call


def reduce_scatter_calls(problem: ReduceScatterProblem, sizes: Sizes, values: Values) -> Calls:
    """The partial sums of a layer's output. `sizes`: ``hidden_size``, elements of a row."""
    _check_alone("reduce_scatter", problem.world_size)
    width = sizes.get("hidden_size", 4096)

    def call(batch: Batch) -> Arguments:
        x = values.normal(batch.tokens, width, dtype=problem.dtype)
        return {"x": x, "group": alone(x.device)}

    return call


def all_gather_calls(problem: AllGatherProblem, sizes: Sizes, values: Values) -> Calls:
    """Rows of a layer's input. `sizes`: ``hidden_size``, elements of a row."""
    _check_alone("all_gather", problem.world_size)
    width, dtype = sizes.get("hidden_size", 4096), getattr(torch, problem.dtype)

    def call(batch: Batch) -> Arguments:
        x = values.normal(batch.tokens, width, dtype="float32").to(dtype)
        return {"x": x, "group": alone(x.device)} | ({"rows": (batch.tokens,)} if problem.unequal else {})

    return call


def _check_alone(op: str, world_size: int) -> None:
    if world_size > 1:
        fix = "one process makes calls of world_size 1 only; run a program on every rank"
        refuse(op, "world_size", f"is {world_size}", fix)
