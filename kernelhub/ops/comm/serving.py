"""Calls of the collectives as serving makes them."""

from __future__ import annotations

from kernelhub.ops.arguments import refuse
from kernelhub.ops.comm.inputs import alone
from kernelhub.ops.comm.problem import AllReduceProblem
from kernelhub.ops.serving import Arguments, Batch, Calls, Sizes, Values


def all_reduce_calls(problem: AllReduceProblem, sizes: Sizes, values: Values) -> Calls:
    """The partial sums of a layer's output. `sizes`: ``hidden_size``, elements of a row."""
    if problem.world_size > 1:
        fix = "one process makes calls of world_size 1 only; run a program on every rank"
        refuse("all_reduce", "world_size", f"is {problem.world_size}", fix)
    width = sizes.get("hidden_size", 4096)

    def call(batch: Batch) -> Arguments:
        x = values.normal(batch.tokens, width, dtype=problem.dtype)
        return {"x": x, "group": alone(x.device)}

    return call
