"""Calls of `expert_parallel_moe` as serving makes them."""

from __future__ import annotations

import dataclasses

from kernelhub.ops.arguments import refuse
from kernelhub.ops.comm.experts.problem import EXACT, FEW, MOST_FEW
from kernelhub.ops.comm.inputs import alone
from kernelhub.ops.moe.experts.problem import ExpertsProblem
from kernelhub.ops.moe.parallel.problem import ParallelProblem
from kernelhub.ops.moe.serving import fused_moe_calls
from kernelhub.ops.serving import Arguments, Batch, Calls, Sizes, Values


def expert_parallel_moe_calls(problem: ParallelProblem, sizes: Sizes, values: Values) -> Calls:
    """A layer of one process: that of `fused_moe`, in a group."""
    if problem.world_size > 1:
        fix = "one process makes calls of world_size 1 only; run a program on every rank"
        refuse("expert_parallel_moe", "world_size", f"is {problem.world_size}", fix)
    names = {item.name for item in dataclasses.fields(ExpertsProblem)}
    facets = {name: value for name, value in vars(problem).items() if name in names}
    layer = fused_moe_calls(ExpertsProblem(**facets), sizes, values)

    def call(batch: Batch) -> Arguments:
        few = max(batch.tokens, 1)
        most = {EXACT: None, FEW: few}.get(problem.capacity, max(few, MOST_FEW + 1))
        return layer(batch) | {"group": alone(values.device), "max_tokens": most}

    return call
