"""From a call of `attention` or `paged_attention` to the launch of the Gluon prefill that is pipelined over tiles."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from kernelhub.backends.gluon.attention.adapter import Prefill
from kernelhub.backends.gluon.attention.prefill_pipelined import pipelined_kernel
from kernelhub.ops.attention.problem import AttentionProblem
from kernelhub.runtime.counters import counters_of, no_counters

# Bytes of keys and values that programs read at about the same time: of the 50 MB of L2, as FlashAttention-3 has it
# (hopper/tile_scheduler.hpp).
_IN_L2 = 32 << 20
_ITEMSIZE = 2


class PipelinedPrefill(Prefill):
    """As `Prefill`, of keys and values in 16 bits."""

    kernel: ClassVar[Any] = pipelined_kernel

    def __init__(self, problem: AttentionProblem) -> None:
        super().__init__(problem)
        self._static["IN_TURNS"] = True

    def order(self, q: Tensor, num_seqs: int, q_tokens: int, kv_tokens: int) -> tuple[Any, ...]:
        """(counters, whether there are such, heads of a section).

        A section has as many heads as fit into L2 with their keys and values, and sections are about equally large.

        Of ragged sequences the mean length is counted. Of pages the host has only how many could be: there keys
        are counted that a sequence has at least, if its queries are its last tokens.
        """
        problem = self.problem
        tokens = kv_tokens
        if problem.ragged:
            tokens = (q_tokens if self._page else kv_tokens) // num_seqs
        elif self._page:
            tokens = min(q_tokens, kv_tokens)
        heads = problem.num_q_heads * (1 if problem.ragged else num_seqs)
        width = problem.head_dim_qk + problem.head_dim_vo
        together = heads_together(heads, problem.group_size, tokens * width * _ITEMSIZE)
        counters = counters_of(q, 2)
        return no_counters(q) if counters is None else counters, int(counters is not None), together


def heads_together(heads: int, group: int, bytes_of_group: int) -> int:
    """How many of the heads a section has, whole groups that share keys and values of so many bytes."""
    groups = heads // group
    fit = max(1, _IN_L2 // max(1, bytes_of_group))
    sections = -(-groups // fit)
    return -(-groups // sections) * group
