"""From a call of `attention` to cuDNN: batched tensors too are packed sequences, of equal lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.backends.cudnn.graphs import Graphs, Shape, Uid
from kernelhub.backends.cudnn.queries import FEWEST_TOKENS, Queries, is_wide, packed
from kernelhub.backends.shared.operands import on_device_of
from kernelhub.ops.attention.adapter import AttentionAdapter, DenseStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.problem import AttentionProblem
from kernelhub.ops.attention.tables import bound, even_offsets, filled_offsets


class Sdpa(AttentionAdapter[AttentionProblem, DenseStep]):
    """`attention` by cuDNN."""

    def __init__(self, problem: AttentionProblem) -> None:
        super().__init__(problem)
        self._graphs = Graphs(problem)

    def launch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: DenseStep,
        values: Values,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        if q.ndim == 4 and not k.shape[1]:  # cuDNN gives NaN where there are no keys
            out.zero_()
            if lse is not None:
                lse.fill_(-torch.inf)
            return
        with on_device_of(q):
            if q.ndim == 4:
                sequences, q_tokens, k_tokens = q.shape[0], q.shape[1], k.shape[1]
                q_at, k_at = (even_offsets(sequences, tokens, q.device) for tokens in (q_tokens, k_tokens))
            else:
                assert step.cu_seqlens_q is not None
                assert step.cu_seqlens_k is not None
                sequences, q_at, k_at = step.num_seqs, step.cu_seqlens_q, step.cu_seqlens_k
                q_tokens = q.shape[0] if step.max_seqlen_q is None else min(q.shape[0], step.max_seqlen_q)
                k_tokens = k.shape[0] if step.max_seqlen_k is None else min(k.shape[0], step.max_seqlen_k)
            if sequences:
                queries = Queries(self.problem, q, q_at, values.scale, out, lse)
                self._run(queries, packed(k), packed(v), k_at, (q_tokens, k_tokens), values)

    def _run(
        self, queries: Queries, k: Tensor, v: Tensor, k_at: Tensor, tokens: tuple[int, int], values: Values
    ) -> None:
        q, sequences = queries.q, queries.sequences
        k_at = filled_offsets(k_at, sequences)
        wide = queries.wide or is_wide(k, v)
        q_bound = bound(tokens[0], FEWEST_TOKENS)
        shape = Shape(
            sequences,
            q_bound,
            bound(tokens[1], q_bound),  # a band aligned bottom right needs as many
            (q.stride(0), q.stride(1)),
            (k.stride(0), k.stride(1)),
            (v.stride(0), v.stride(1)),
            wide,
            queries.scale,
            values.window_left,
            values.window_right,
        )
        k_wide, k_lens = k_at.long() if wide else k_at, k_at.diff()
        keys = {
            Uid.K: k,
            Uid.V: v,
            Uid.K_LENS: k_lens,
            Uid.K_AT: k_wide * k.stride(0),
            Uid.V_AT: k_wide * v.stride(0),
        }
        self._graphs.run(shape, queries.tensors(wide) | keys)
        if self.problem.ragged:
            queries.blank(k_lens)
        queries.finish()
