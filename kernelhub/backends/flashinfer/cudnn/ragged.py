"""From a call of `attention` to cuDNN as FlashInfer calls it. Batches are sequences of one length."""

from __future__ import annotations

import torch
from flashinfer.cudnn.prefill import cudnn_batch_prefill_with_kv_cache
from torch import Tensor

from kernelhub.backends.flashinfer.cudnn.library import FEWEST_TOKENS, NATURAL, Classes
from kernelhub.backends.flashinfer.cudnn.packed import WIDE, PackedQueries, flat
from kernelhub.backends.flashinfer.steps import RECOMMENDED_BYTES, stream_of, workspace
from kernelhub.backends.shared.operands import on_device_of
from kernelhub.ops.attention.adapter import AttentionAdapter, DenseStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.problem import AttentionProblem
from kernelhub.ops.attention.tables import bound, even_offsets, filled_offsets


class Ragged(AttentionAdapter[AttentionProblem, DenseStep]):
    """Packed sequences, or batches of sequences of one length. Operands with gaps are copied."""

    def __init__(self, problem: AttentionProblem) -> None:
        super().__init__(problem)
        self._classes = Classes()

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
        with on_device_of(q):
            if q.ndim == 4:
                tokens, keys = q.shape[1], k.shape[1]
                q_at, k_at = (even_offsets(q.shape[0], length, q.device) for length in (tokens, keys))
            elif step.num_seqs == 0:  # tokens that belong to no sequence
                return
            else:
                assert step.cu_seqlens_q is not None
                assert step.cu_seqlens_k is not None
                q_at, k_at = step.cu_seqlens_q, step.cu_seqlens_k
                tokens = q.shape[0] if step.max_seqlen_q is None else min(q.shape[0], step.max_seqlen_q)
                keys = k.shape[0] if step.max_seqlen_k is None else min(k.shape[0], step.max_seqlen_k)
            most = bound(tokens, FEWEST_TOKENS)
            queries = PackedQueries(self.problem, q, q_at, most, values.scale, out, lse)
            # A causal mask aligned bottom right needs at least as many keys as queries.
            self._run(
                queries, flat(_some(k)), flat(_some(v)), filled_offsets(k_at, queries.sequences), bound(keys, most)
            )

    def workspace_bytes(self, num_seqs: int, num_tokens: int, max_kv_len: int) -> int:
        """Scratch, shared by the kernels of a stream."""
        return RECOMMENDED_BYTES

    def _run(self, queries: PackedQueries, k: Tensor, v: Tensor, k_at: Tensor, most: int) -> None:
        problem, device = self.problem, k.device
        wide = queries.wide or max(k.numel(), v.numel()) >= WIDE
        k_lens = k_at.diff().view(-1, 1, 1, 1)
        at = (k_at.long() if wide else k_at).view(-1, 1, 1, 1)
        given = queries.given(wide)
        with self._classes.meet((queries.sequences, queries.most, most, queries.scale, wide)):
            cudnn_batch_prefill_with_kv_cache(
                queries.q,
                k,
                v,
                queries.scale,
                workspace("cudnn", device, stream_of(device)),
                max_token_per_sequence=queries.most,
                max_sequence_kv=most,
                actual_seq_lens_q=given.lens,
                actual_seq_lens_kv=k_lens,
                causal=problem.causal,
                return_lse=given.lse is not None,
                batch_offsets_q=given.at,
                batch_offsets_o=given.out_at,
                batch_offsets_k=at * (problem.num_kv_heads * problem.head_dim_qk),
                batch_offsets_v=at * (problem.num_kv_heads * problem.head_dim_vo),
                batch_offsets_stats=given.lse_at,
                out=given.out,
                lse=given.lse,
                **NATURAL,
            )
        queries.finish(k_lens)


def _some(keys: Tensor) -> Tensor:
    """Keys, or one unused key, since the library requires an address."""
    if keys.numel():
        return keys
    return torch.zeros(1, *keys.shape[-2:], dtype=keys.dtype, device=keys.device)
