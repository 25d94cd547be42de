"""The ops of the indexer in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.indexer.layout import split_cache
from kernelhub.ops.precision import at_own_precision

_AT_A_TIME = 1 << 25  # scores: 256 MB of float64


@at_own_precision
def mqa_logits_reference(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor | None,
    weights: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    out: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`mqa_logits`, computed in `dtype` and returned in it; arguments as of the op, the destination ignored."""
    logits = _scores(q, k, weights, dtype)
    if k_scale is not None:
        logits = logits * k_scale.to(dtype)
    key = torch.arange(k.shape[0], device=q.device)
    seen = (key >= cu_seqlen_ks[:, None]) & (key < cu_seqlen_ke[:, None])
    return torch.where(seen, logits, -torch.inf)


@at_own_precision
def paged_mqa_logits_reference(
    q: Tensor,
    k_cache: Tensor,
    k_scale_cache: Tensor | None,
    weights: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    out: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`paged_mqa_logits`, one sequence after the other; as `mqa_logits_reference`."""
    k_cache, k_scale_cache = split_cache(k_cache, k_scale_cache, q.shape[-1])
    next_n = q.shape[1]
    logits = torch.full((q.shape[0] * next_n, max_seq_len), -torch.inf, dtype=dtype, device=q.device)
    for sequence, length in enumerate(seq_lens.tolist()):
        pages = block_table[sequence, : -(-length // k_cache.shape[1])].long()
        k = _raw(k_cache)[pages].view(k_cache.dtype).flatten(0, 1)[:length]
        scale = None if k_scale_cache is None else k_scale_cache[pages].flatten()[:length]
        ends = torch.arange(length - next_n + 1, length + 1, device=q.device)
        rows = slice(sequence * next_n, (sequence + 1) * next_n)
        scored = mqa_logits_reference(q[sequence], k, scale, weights[rows], torch.zeros_like(ends), ends, dtype=dtype)
        logits[rows, :length] = scored[:, :max_seq_len]
    return logits


def topk_indices_reference(
    logits: Tensor,
    k: int,
    row_starts: Tensor | None = None,
    row_ends: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`topk_indices`, by a stable sort of each row; arguments as of the op, the destination ignored."""
    rows, columns = logits.shape
    indices = torch.full((rows, k), -1, dtype=torch.int32, device=logits.device)
    zeros = torch.zeros(rows, 1, dtype=torch.int64, device=logits.device)
    starts = zeros if row_starts is None else row_starts[:, None].long().clamp(min=0)
    ends = zeros + columns if row_ends is None else row_ends[:, None].long().clamp(max=columns)
    step = max(1, _AT_A_TIME // max(columns, 1))
    for first in range(0, rows, step):
        mine = slice(first, first + step)
        low, high = int(starts[mine].min()), int(ends[mine].max())
        column = torch.arange(low, max(low, high), device=logits.device)
        seen = (column >= starts[mine]) & (column < ends[mine])
        values = torch.where(seen, logits[mine, low : max(low, high)], -torch.inf)
        best = torch.sort(values, dim=1, descending=True, stable=True).indices[:, :k]
        chosen = torch.where(values.gather(1, best) == -torch.inf, columns, best + low).sort(1).values
        indices[mine, : chosen.shape[1]] = torch.where(chosen == columns, -1, chosen - starts[mine]).int()
    return indices


def _scores(q: Tensor, k: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, S] without the keys' scales, some queries at a time."""
    k = k.to(dtype)
    logits = k.new_empty(q.shape[0], k.shape[0])
    step = max(1, _AT_A_TIME // max(1, q.shape[1] * k.shape[0]))
    for first in range(0, q.shape[0], step):
        mine = slice(first, first + step)
        scores = (q[mine].to(dtype) @ k.T).relu()
        logits[mine] = (weights[mine, None].to(dtype) @ scores).squeeze(1)
    return logits


def _raw(tensor: Tensor) -> Tensor:
    """float8 as bytes, which every device can index."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
