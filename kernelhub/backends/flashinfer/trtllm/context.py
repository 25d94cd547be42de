"""From a call of `paged_attention` to TensorRT-LLM's kernels of many queries.

They read block tables and lengths on the device. How many queries and keys a sequence has at most is read on the host.
"""

from __future__ import annotations

import torch
from flashinfer.prefill import trtllm_batch_context_with_kv_cache
from torch import Tensor

from kernelhub.backends.flashinfer.steps import (
    RECOMMENDED_BYTES,
    alike,
    query_offsets,
    split_scale,
    stream_of,
    workspace,
)
from kernelhub.backends.flashinfer.trtllm.packed import Packed, packed, spread
from kernelhub.backends.shared.operands import on_device_of, row_major
from kernelhub.ops.attention.adapter import AttentionAdapter, PagedStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.problem import ONE, PagedAttentionProblem


class Context(AttentionAdapter[PagedAttentionProblem, PagedStep]):
    """Any number of queries of each sequence over a paged cache."""

    def __init__(self, problem: PagedAttentionProblem) -> None:
        super().__init__(problem)
        # A sole query sees all of its sequence, and causal masks are what windows were written for.
        self._causal = problem.causal or (problem.q_len == ONE and not problem.ragged)
        # The number of queries per sequence of the last step, unless the step has it.
        self._q_len = 1 if problem.ragged or problem.q_len == ONE else 0
        if problem.device.type == "cuda":  # one token, to load the module or to report that it is missing
            dtype, dims = self._q
            q = torch.zeros(1, *dims, dtype=dtype, device="cuda")
            cache, table = q.new_zeros(1, *self._k[1]), torch.zeros(1, 1, dtype=torch.int32, device="cuda")
            sinks = q.new_zeros(dims[0]) if problem.sinks else None
            values = Values(1.0, window_left=0 if problem.window_left else -1, sinks=sinks)
            step = PagedStep(table, table[0] + 1, lengths=[1])
            self.launch(q, cache, cache, step, values, torch.empty_like(q), None)

    def begin(self, step: PagedStep) -> None:
        step.lengths()
        if step.cu_seqlens_q is not None:
            step.q_offsets()
        if step.num_seqs and self._q_len:
            self._at(step, self._q_len)

    def launch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: PagedStep,
        values: Values,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        if step.num_seqs == 0:  # ragged, with tokens that belong to no sequence
            return
        self._q_len = q.shape[1] if q.ndim == 4 else 1
        at, table = self._at(step, self._q_len)
        sm_scale, factor = split_scale(values.scale)
        sinks = None if values.sinks is None else row_major(values.sinks.to(torch.float32))
        stream = stream_of(q.device)

        def run(q: Tensor, out: Tensor) -> None:
            trtllm_batch_context_with_kv_cache(
                q,
                alike(k, v),
                workspace(trtllm_batch_context_with_kv_cache.__name__, q.device, stream),
                table,
                at.kv_lens,
                at.most_q,
                at.most_kv,
                sm_scale,
                1.0,
                at.kv_lens.shape[0],
                at.q_offsets,
                at.kv_offsets,
                window_left=values.window_left,
                out=out,
                sinks=sinks,
                kv_layout=self.problem.kv_layout,
                causal=self._causal,
            )

        with on_device_of(q):
            spread(run, at, q, factor, out)

    def workspace_bytes(self, num_seqs: int, num_tokens: int, max_kv_len: int) -> int:
        """Scratch, shared by the kernels of a stream."""
        return RECOMMENDED_BYTES

    def _at(self, step: PagedStep, tokens: int) -> tuple[Packed, Tensor]:
        """Where the step's queries are, and the rows of the block table that they need; made once a step."""
        known: dict[int, tuple[Packed, Tensor]] | None = step.state
        if known is None:
            known = step.state = {}
        if tokens not in known:
            table = step.block_table
            at = packed(query_offsets(step, tokens), step.lengths(), self._causal, table.device)
            if at.sequences is not None:
                table = table[
                    torch.tensor(at.sequences, dtype=torch.int64, device="cpu").to(table.device, non_blocking=True)
                ]
            known[tokens] = (at, table.clamp(min=0))  # entries past a sequence's pages may have any value
        return known[tokens]
