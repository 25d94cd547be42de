"""From a call of `paged_attention` to cuDNN as FlashInfer calls it. Lengths and pages are read on the device."""

from __future__ import annotations

import torch
from flashinfer.cudnn.decode import cudnn_batch_decode_with_kv_cache
from flashinfer.cudnn.prefill import cudnn_batch_prefill_with_kv_cache
from torch import Tensor

from kernelhub.backends.flashinfer.cudnn.library import FEWEST_TOKENS, NATURAL, Classes
from kernelhub.backends.flashinfer.cudnn.packed import PackedQueries, flat
from kernelhub.backends.flashinfer.steps import RECOMMENDED_BYTES, stream_of, workspace
from kernelhub.backends.shared.operands import on_device_of, pages_by_head, positive_scale
from kernelhub.ops.attention.adapter import AttentionAdapter, PagedStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.problem import PagedAttentionProblem
from kernelhub.ops.attention.tables import bound, filled_lengths, filled_table, offsets_of_queries
from kernelhub.ops.precision import without_autocast


class Pages(AttentionAdapter[PagedAttentionProblem, PagedStep]):
    """Shared by both kernels."""

    def __init__(self, problem: PagedAttentionProblem) -> None:
        super().__init__(problem)
        self._classes = Classes()

    def workspace_bytes(self, num_seqs: int, num_tokens: int, max_kv_len: int) -> int:
        """Scratch, shared by the kernels of a stream."""
        return RECOMMENDED_BYTES

    def _tables(self, step: PagedStep, sequences: int, most: int) -> tuple[Tensor, Tensor]:
        """The block table of as many pages as hold `most` tokens, and int32 [sequences, 1, 1, 1] of lengths."""
        page_size = self.problem.page_size
        table = filled_table(step.block_table, step.seq_lens, page_size, sequences, most // page_size)
        return table, filled_lengths(step.seq_lens, sequences, step.max_pages * page_size)


class Prefill(Pages):
    """Any number of queries of each sequence."""

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
        with on_device_of(q):
            q_at, tokens = offsets_of_queries(step, q)
            most_q = bound(tokens, FEWEST_TOKENS)
            queries = PackedQueries(self.problem, q, q_at, most_q, values.scale, out, lse)
            most = bound(max(1, step.max_pages) * self.problem.page_size, most_q)
            table, lens = self._tables(step, queries.sequences, most)
            k, v = (pages_by_head(cache, self.problem.kv_layout) for cache in (k, v))
            wide = queries.wide
            given = queries.given(wide)
            sizes = (queries.sequences, most_q, most, queries.scale, wide)
            with self._classes.meet((*sizes, k.shape, k.stride(), v.stride())):
                cudnn_batch_prefill_with_kv_cache(
                    queries.q,
                    k,
                    v,
                    queries.scale,
                    workspace("cudnn", q.device, stream_of(q.device)),
                    max_token_per_sequence=most_q,
                    max_sequence_kv=most,
                    actual_seq_lens_q=given.lens,
                    actual_seq_lens_kv=lens,
                    block_tables=table,
                    causal=self.problem.causal,
                    return_lse=given.lse is not None,
                    batch_offsets_q=given.at,
                    batch_offsets_o=given.out_at,
                    batch_offsets_stats=given.lse_at,
                    out=given.out,
                    lse=given.lse,
                    **NATURAL,
                )
            queries.finish(lens)


class Decode(Pages):
    """One query of each sequence by cuDNN's decode kernel, without an LSE."""

    @without_autocast  # which joins no rows of another half precision than its own
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
        q, scale = positive_scale(q, values.scale)
        number, sequences = step.num_seqs, bound(step.num_seqs)
        most = bound(max(1, step.max_pages) * self.problem.page_size, FEWEST_TOKENS)
        with on_device_of(q):
            rows = flat(q)
            if sequences > number:
                rows = torch.cat([rows, rows.new_zeros(sequences - number, *rows.shape[1:])])
            direct = sequences == number and out.is_contiguous() and not out.data_ptr() & 15
            made = flat(out) if direct else rows.new_empty(*rows.shape[:2], self.problem.head_dim_vo)
            table, lens = self._tables(step, sequences, most)
            k, v = (pages_by_head(cache, self.problem.kv_layout) for cache in (k, v))
            with self._classes.meet((sequences, most, scale, k.shape, k.stride(), v.stride())):
                cudnn_batch_decode_with_kv_cache(
                    rows,
                    k,
                    v,
                    float(scale),
                    workspace("cudnn", q.device, stream_of(q.device)),
                    max_sequence_kv=most,
                    actual_seq_lens_kv=lens,
                    block_tables=table,
                    out=made,
                )
            made.masked_fill_(lens.view(-1, 1, 1) == 0, 0.0)
            if not direct:
                out.copy_(made[:number].view(out.shape))
