"""Calls of `linear_attention` as serving makes them."""

from __future__ import annotations

import torch

from kernelhub.ops.linear_attention.inputs import slopes
from kernelhub.ops.linear_attention.problem import LinearProblem
from kernelhub.ops.serving import Arguments, Batch, Calls, Sizes, Values


def linear_attention_calls(problem: LinearProblem, sizes: Sizes, values: Values) -> Calls:
    """New tokens of sequences that continue from their states, if the problem has any."""
    heads, width = problem.num_heads, problem.head_dim
    decay = slopes(heads).to(values.device)

    def call(batch: Batch) -> Arguments:
        rows = (batch.tokens,) if problem.ragged else (batch.num_seqs, batch.q_lens[0])
        made: Arguments = {
            "q": values.normal(*rows, heads, width, dtype=problem.dtype),
            "k": values.normal(*rows, heads, width, dtype=problem.dtype, size=width**-0.5),
            "v": values.normal(*rows, heads, problem.value_dim, dtype=problem.dtype),
            "decay": decay,
        }
        pool = batch.num_seqs + 2 if problem.state_indices else batch.num_seqs
        states = (pool, heads, width, problem.value_dim)
        if problem.state or problem.state_indices:
            made["state"] = values.normal(*states, dtype=torch.float32)
        if problem.out_state:
            made["out_state"] = made.get("state", values.normal(*states, dtype=torch.float32))
        if problem.state_indices:
            made["state_indices"] = values.order(pool)[: batch.num_seqs].int()
        if problem.ragged:
            made["cu_seqlens"] = values.offsets(batch.q_lens)
        return made

    return call
