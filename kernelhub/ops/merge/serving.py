"""Calls of `merge_attention_states` as serving makes them."""

from __future__ import annotations

import torch

from kernelhub.ops.merge.problem import TWO, MergeProblem
from kernelhub.ops.serving import Arguments, Batch, Calls, Sizes, Values


def merge_calls(problem: MergeProblem, sizes: Sizes, values: Values) -> Calls:
    """States of chunks of the context. `sizes`: ``parts``, how many where there are more than two."""
    parts = 2 if problem.parts == TWO else sizes.get("parts", 4)

    def call(batch: Batch) -> Arguments:
        rows = (batch.num_seqs, batch.q_lens[0]) if problem.batched else (batch.tokens,)
        heads = problem.num_heads
        outs = [values.normal(*rows, heads, problem.head_dim, dtype=problem.dtype) for _ in range(parts)]
        lses = [values.normal(*rows[:-1], heads, rows[-1], dtype=torch.float32, size=4.0) for _ in range(parts)]
        made: Arguments = {"outs": outs, "lses": lses, **({"return_lse": True} if problem.lse else {})}
        if problem.out_scale is not None:
            made["out_scale"] = values.near(1, size=0.1) if problem.out_scale == "tensor" else 1.0
        return made

    return call
