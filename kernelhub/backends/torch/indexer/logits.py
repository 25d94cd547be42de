"""The indexer's logits by matrix products in float32, which hold every product of narrower types exactly.

scores = relu(q k^T)          [queries x heads, keys] of a block
logits = weights scores       a row of heads times [heads, keys], for each query
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.backends.torch.attention.sequences import e4m3_values
from kernelhub.ops.indexer.adapter import LogitsAdapter, PagedLogitsAdapter
from kernelhub.ops.precision import at_own_precision
from kernelhub.runtime.scratch import scratch

_SCORES = 1 << 20  # of a block, 4 MB in float32, which a cache may hold: those of all keys may be gigabytes
_ROWS = 4096  # queries times heads that a block of keys is decoded for


class Logits(LogitsAdapter):
    """`mqa_logits` anywhere."""

    @at_own_precision
    def launch(
        self,
        q: Tensor,
        k: Tensor,
        k_scale: Tensor | None,
        weights: Tensor,
        cu_seqlen_ks: Tensor,
        cu_seqlen_ke: Tensor,
        out: Tensor,
    ) -> None:
        tokens, heads, _ = q.shape
        keys = k.shape[0]
        rows = max(1, min(_ROWS // heads, tokens))
        columns = max(1, _SCORES // (heads * rows))
        position = torch.arange(keys, dtype=torch.int32, device=q.device)
        for t in range(0, tokens, rows):
            queries = slice(t, t + rows)
            starts, ends = cu_seqlen_ks[queries], cu_seqlen_ke[queries]
            first, last = 0, keys
            if q.device.type == "cpu":  # where reading a range waits for nothing
                first, last = max(0, int(starts.min())), min(keys, int(ends.max()))
                out[queries].fill_(-torch.inf)
            values = _floats("indexer q", q[queries])
            for s in range(first, last, columns):
                block = slice(s, min(s + columns, last))
                logits = _weighed(values, _floats("indexer k", k[block]), weights[queries])
                if k_scale is not None:
                    logits.mul_(k_scale[block])
                at = position[block]
                seen = (at >= starts[:, None]) & (at < ends[:, None])
                out[queries, block] = torch.where(seen, logits, -torch.inf)


class PagedLogits(PagedLogitsAdapter):
    """`paged_mqa_logits` anywhere: sequence by sequence on a CPU, elsewhere all of them, whose lengths stay there."""

    @at_own_precision
    def launch(
        self,
        q: Tensor,
        k_cache: Tensor,
        k_scale_cache: Tensor | None,
        weights: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        out: Tensor,
    ) -> None:
        out.fill_(-torch.inf)
        bound = min(out.shape[1], block_table.shape[1] * self.problem.page_size)
        if k_cache.shape[0] == 0:
            return
        if q.device.type != "cpu":
            self._score(q, k_cache, k_scale_cache, weights, block_table, seq_lens, out, bound)
            return
        next_n = q.shape[1]
        for index, length in enumerate(seq_lens.tolist()):
            one = slice(index, index + 1)
            rows = slice(index * next_n, (index + 1) * next_n)
            self._score(
                q[one],
                k_cache,
                k_scale_cache,
                weights[rows],
                block_table[one],
                seq_lens[one],
                out[rows],
                min(bound, length),
            )

    def _score(
        self,
        q: Tensor,
        k_cache: Tensor,
        k_scale_cache: Tensor | None,
        weights: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        out: Tensor,
        bound: int,
    ) -> None:
        """The first `bound` columns of some sequences."""
        batch, next_n, heads, width = q.shape
        page = self.problem.page_size
        pages = max(1, _SCORES // (batch * next_n * heads) // page)
        raw = k_cache.view(torch.uint8) if k_cache.dtype.itemsize == 1 else k_cache
        values = _floats("indexer q", q.reshape(batch, next_n * heads, width))
        later = torch.arange(next_n, dtype=torch.int32, device=q.device)
        ends = (seq_lens[:, None] - (next_n - 1) + later).flatten()
        for s in range(0, bound, pages * page):
            stop = min(s + pages * page, bound)
            there = block_table[:, s // page : -(-stop // page)].long().clamp_(0, k_cache.shape[0] - 1)
            keys = raw[there].view(k_cache.dtype).flatten(1, 2)[:, : stop - s]
            scores = torch.bmm(values, _floats("indexer k", keys).transpose(1, 2)).relu_()
            logits = torch.bmm(weights.unsqueeze(1), scores.view(batch * next_n, heads, stop - s)).squeeze(1)
            if k_scale_cache is not None:
                scales = k_scale_cache[there].flatten(1)[:, : stop - s]
                logits.view(batch, next_n, -1).mul_(scales.unsqueeze(1))
            position = torch.arange(s, stop, dtype=torch.int32, device=q.device)
            out[:, s:stop] = torch.where(position < ends[:, None], logits, -torch.inf)


def _weighed(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """[t, keys] of float32 q [t, H, D], k [keys, D] and weights [t, H]."""
    tokens, heads, _ = q.shape
    scores = scratch("indexer scores", (tokens * heads, k.shape[0]), torch.float32, q.device)
    torch.mm(q.flatten(0, 1), k.T, out=scores)
    scores.relu_()
    return torch.bmm(weights.unsqueeze(1), scores.view(tokens, heads, -1)).squeeze(1)


def _floats(tag: str, tensor: Tensor) -> Tensor:
    """Values in float32, exactly, in memory that the next call with the same tag takes again."""
    if tensor.device.type != "cpu":
        return tensor.float()
    into = scratch(tag, tensor.shape, torch.float32, tensor.device)
    if tensor.dtype.itemsize == 1:
        e4m3_values(tag, tensor, into)
    else:
        into.copy_(tensor)
    return into
