"""Latent attention over gathered rows of the cache, each of which is key and value of all heads.

    for each sequence, for each block of queries:
        scores = scale * q c^T over the tokens that some query of the block sees, in float32
        mask, append sinks, softmax, times the latents

With `topk_indices` the rows that each query names are gathered for itself, and a block of queries is one batched
product. All heads of a block are rows of one product.

Scores are in float32 for every dtype of operands: rounded to bfloat16 they would be off by 2^-9 of themselves. The
weights may be rounded to the dtype of the values (`kernelhub.ops.attention.tolerance`), and on a CPU the second
product of bfloat16 operands is one in bfloat16, which takes a quarter of the time (torch 2.13). An fp8 latent is exact
in bfloat16, and its scale multiplies scores and results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.backends.torch.attention.sequences import gathered, widened
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.mla.attention.adapter import MlaAdapter, MlaValues
from kernelhub.ops.mla.attention.problem import MlaProblem
from kernelhub.ops.precision import at_own_precision

_SCORES_PER_BLOCK = 1 << 24  # 64 MB of float32
_GATHERED_PER_BLOCK = 1 << 24  # elements of rows that queries name for themselves


class Gathered(MlaAdapter):
    """`mla_attention` anywhere."""

    def __init__(self, problem: MlaProblem) -> None:
        super().__init__(problem)
        narrow = problem.device.type == "cpu" and problem.q_dtype == "bfloat16"
        self._weights = torch.bfloat16 if narrow else torch.float32

    @at_own_precision
    def launch(
        self,
        q: Tensor,
        kv_cache: Tensor,
        topk_indices: Tensor | None,
        step: PagedStep,
        values: MlaValues,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        if topk_indices is not None:
            self._listed(q, kv_cache, topk_indices, step, values, out, lse)
            return
        lengths = step.lengths()
        starts = step.q_offsets() if step.cu_seqlens_q is not None else list(range(step.num_seqs + 1))
        pages_of = kv_cache.unsqueeze(2)
        for i, length in enumerate(lengths):
            if q.ndim == 4:
                rows, out_i, lse_i = q[i], out[i], None if lse is None else lse[i]
            else:
                mine = slice(starts[i], starts[i + 1])
                rows, out_i, lse_i = q[mine], out[mine], None if lse is None else lse[:, mine]
            if rows.shape[0]:
                used = step.block_table[i, : -(-length // self.problem.page_size)].long()
                self._sequence(rows, gathered("latents", pages_of, used)[:length, 0], values, out_i, lse_i)

    def _sequence(self, q: Tensor, cached: Tensor, values: MlaValues, out: Tensor, lse: Tensor | None) -> None:
        """One sequence: q [S, H, D], cached [L, D], out [S, H, V], lse [H, S]."""
        tokens, heads = q.shape[:2]
        length = cached.shape[0]
        keys = widened("latents wide", cached, None, torch.float32)
        latents = self._latents(cached, keys)
        factor = _score_factor(values)
        block = max(1, _SCORES_PER_BLOCK // max(1, heads * length))
        for start in range(0, tokens, block):
            some = slice(start, min(start + block, tokens))
            count = some.stop - some.start
            position = length - tokens + start
            high = min(length, max(0, position + count)) if self.problem.causal else length
            rows = q[some].flatten(0, 1).float() * factor
            scores = torch.matmul(rows, keys[:high].T).unflatten(0, (count, heads))
            hidden = None
            if self.problem.causal and position < high - 1:
                at = torch.arange(position, position + count, device=q.device)[:, None]
                hidden = torch.arange(high, device=q.device) > at
            weights, row_lse = _softmax(scores, values, hidden)
            o = torch.matmul(weights.to(self._weights).flatten(0, 1), latents[:high]).unflatten(0, (count, heads))
            _store(o, row_lse, values, out[some], None if lse is None else lse[:, some])

    def _listed(
        self,
        q: Tensor,
        kv_cache: Tensor,
        topk_indices: Tensor,
        step: PagedStep,
        values: MlaValues,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Queries with keys of their own; nothing here waits for the device."""
        each = 1 if q.ndim == 3 else q.shape[1]
        token = torch.arange(topk_indices.shape[0], device=q.device)
        if step.cu_seqlens_q is None:
            sequence, belongs = token // each, None
            position = step.seq_lens[sequence] - each + token % each
        else:
            ends = step.cu_seqlens_q[1:].contiguous()
            sequence = torch.bucketize(token, ends, right=True)
            belongs = sequence < step.num_seqs
            sequence = sequence.clamp(max=max(0, step.num_seqs - 1))
            position = step.seq_lens[sequence] - ends[sequence] + token
        if step.num_seqs == 0:
            return
        limit = step.seq_lens[sequence].clamp(max=step.max_pages * self.problem.page_size)
        if self.problem.causal:
            limit = torch.minimum(limit, position + 1)
        if q.ndim == 4:
            out_rows = out.flatten(0, 1) if out.is_contiguous() else out.new_empty((len(token), *out.shape[2:]))
            lse_rows = None if lse is None else lse.new_empty(lse.shape[1], len(token))
        else:
            out_rows, lse_rows = out, lse
        rows = q.flatten(0, 1) if q.ndim == 4 else q
        factor = _score_factor(values)
        each_token = topk_indices.shape[1] * (self.problem.head_dim + q.shape[-2])
        block = max(1, _GATHERED_PER_BLOCK // max(1, each_token))
        for start in range(0, len(token), block):
            some = slice(start, start + block)
            listed = topk_indices[some]
            hidden = (listed < 0) | (listed >= limit[some, None])
            # What is not seen repeats what is, so that no row is read that no list names.
            seen = listed.gather(1, _first_seen(hidden)) if listed.shape[1] else listed
            positions = torch.where(hidden, seen, listed).long()
            positions.masked_fill_(hidden.all(1, keepdim=True), 0)  # what none names may be anything
            cached = self._named(kv_cache, step.block_table, sequence[some], positions)
            keys = cached.float()
            scores = torch.bmm(rows[some].float() * factor, keys.transpose(1, 2))
            weights, row_lse = _softmax(scores, values, hidden)
            o = torch.bmm(weights.to(self._weights), self._latents(cached, keys))
            o.masked_fill_(hidden.all(1)[:, None, None], 0.0)  # the row of missing entries may have any value
            kept = None if belongs is None else belongs[some]
            _store(o, row_lse, values, out_rows[some], None if lse_rows is None else lse_rows[:, some], kept)
        if out_rows is not out and not out.is_contiguous():
            out.copy_(out_rows.unflatten(0, out.shape[:2]))
        if lse is not None and lse_rows is not None and lse_rows is not lse:
            lse.copy_(lse_rows.unflatten(1, (lse.shape[0], lse.shape[2])).transpose(0, 1))

    def _named(self, kv_cache: Tensor, block_table: Tensor, sequence: Tensor, positions: Tensor) -> Tensor:
        """Rows [T, topk, D] of the cache, those of fp8 in the dtype of the weights."""
        page_size = self.problem.page_size
        if block_table.shape[1] == 0 or kv_cache.shape[0] == 0:
            shape = (*positions.shape, kv_cache.shape[-1])
            return torch.zeros(shape, dtype=self._weights, device=kv_cache.device)
        # A sequence without tokens has no page: what its table holds may be anything.
        pages = block_table[sequence[:, None], positions // page_size].long().clamp(0, kv_cache.shape[0] - 1)
        raw = kv_cache.view(torch.uint8) if kv_cache.dtype.itemsize == 1 else kv_cache  # torch 2.8: no float8 indexing
        place = positions % page_size
        if raw.is_contiguous():
            slots = (pages * page_size + place).flatten()
            rows = raw.flatten(0, 1).index_select(0, slots).unflatten(0, positions.shape)
        else:
            rows = raw[pages, place]
        rows = rows.view(kv_cache.dtype)
        return widened("named", rows, None, self._weights) if kv_cache.dtype.itemsize == 1 else rows

    def _latents(self, cached: Tensor, keys: Tensor) -> Tensor:
        """Values: the first elements of rows, in the dtype of the weights; `keys` are the same rows in float32."""
        same = cached if cached.dtype is self._weights else keys
        return same[..., : self.problem.value_dim].to(self._weights)


def _score_factor(values: MlaValues) -> float | Tensor:
    """Queries times the factor of scores: they are fewer than the scores."""
    return values.scale if values.kv_scale is None else values.scale * values.kv_scale


def _first_seen(hidden: Tensor) -> Tensor:
    """[T, 1]: for each row of `hidden` [T, K] the first that is not; 0 where there is none."""
    return (~hidden).to(torch.uint8).argmax(1, keepdim=True)


def _softmax(scores: Tensor, values: MlaValues, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights [T, H, K] and LSE [T, H] of scores, which are overwritten; `hidden` [T, K] says which no head sees.

    torch has a kernel of its own for log_softmax, an eighth of the time of logsumexp on a CPU (torch 2.13). The LSE is
    what it took away from any one score.
    """
    if scores.shape[2] == 0:
        row_lse = scores.new_full(scores.shape[:2], -torch.inf)
        return scores, row_lse if values.sinks is None else torch.logaddexp(row_lse, values.sinks.float())
    if hidden is not None:
        scores.masked_fill_(hidden[:, None], -torch.inf)
        one = _first_seen(hidden)[:, :, None].expand(-1, scores.shape[1], -1)
    else:
        one = torch.zeros((1, 1, 1), dtype=torch.int64, device=scores.device).expand(*scores.shape[:2], 1)
    logs = torch.log_softmax(scores, 2)
    row_lse = (scores.gather(2, one) - logs.gather(2, one)).squeeze(2)
    weights = logs.exp_()
    if hidden is not None:
        nothing = hidden.all(1)[:, None]
        row_lse.masked_fill_(nothing, -torch.inf)
        weights.masked_fill_(nothing[:, :, None], 0.0)
    if values.sinks is not None:
        whole = torch.logaddexp(row_lse, values.sinks.float())
        # Sinks of -inf beside no key: both are -inf, and weights are 0 already.
        weights.mul_(torch.where(row_lse == -torch.inf, 0.0, (row_lse - whole).exp())[:, :, None])
        row_lse = whole
    return weights, row_lse


def _store(
    o: Tensor, row_lse: Tensor, values: MlaValues, out: Tensor, lse: Tensor | None, belongs: Tensor | None = None
) -> None:
    """Write rows o [T, H, V] and their LSE [T, H], but for tokens that belong to no sequence."""
    if values.kv_scale is not None:
        o = o.float() * values.kv_scale
    if belongs is not None:
        o = torch.where(belongs[:, None, None], o.to(out.dtype), out)
        row_lse = row_lse if lse is None else torch.where(belongs[:, None], row_lse, lse.T)
    out.copy_(o)
    if lse is not None:
        lse.copy_(row_lse.T)
