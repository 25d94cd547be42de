"""Calls of the collectives of experts as serving makes them."""

from __future__ import annotations

from typing import Any

import torch

from kernelhub.ops.arguments import refuse
from kernelhub.ops.comm.experts.inputs import combine_inputs, dispatch_inputs
from kernelhub.ops.comm.experts.problem import ALL, EXACT, MOST_FEW, CombineProblem, DispatchProblem
from kernelhub.ops.serving import Arguments, Batch, Calls, Sizes, Values


def moe_dispatch_calls(problem: DispatchProblem, sizes: Sizes, values: Values) -> Calls:
    """A layer's tokens."""

    def call(batch: Batch) -> Arguments:
        return dispatch_inputs(**_inputs("moe_dispatch", problem, batch), device=values.device)

    return call


def moe_combine_calls(problem: CombineProblem, sizes: Sizes, values: Values) -> Calls:
    """A layer's results."""

    def call(batch: Batch) -> Arguments:
        given = _inputs("moe_combine", problem, batch)
        return combine_inputs(**given, all_tokens=problem.rows == ALL, device=values.device)

    return call


def _inputs(op: str, problem: DispatchProblem | CombineProblem, batch: Batch) -> dict[str, Any]:
    if problem.world_size > 1:
        fix = "one process makes calls of world_size 1 only; run a program on every rank"
        refuse(op, "world_size", f"is {problem.world_size}", fix)
    most = {EXACT: None, "few": max(batch.tokens, 1)}.get(problem.capacity, max(batch.tokens, MOST_FEW + 1))
    return {
        "tokens": batch.tokens,
        "hidden_size": problem.hidden_size,
        "num_experts": problem.num_experts,
        "top_k": problem.top_k,
        "dtype": getattr(torch, problem.dtype),
        "format": problem.format,
        "max_tokens": most,
    }
