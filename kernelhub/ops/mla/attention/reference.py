"""`mla_attention` in plain torch: written to be obviously right, not to be fast.

Computed in float32, or float64 on request; one sequence at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.precision import at_own_precision

_AT_A_TIME = 1 << 25  # scores: 256 MB of float64


@at_own_precision
def mla_attention_reference(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    value_dim: int = 512,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = True,
    topk_indices: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_scale: float | Tensor | None = None,
    return_lse: bool = False,
    compute_dtype: torch.dtype = torch.float32,
) -> Any:
    """The op; arguments and layouts as of it, results in `compute_dtype`."""
    num_seqs, page_size, heads = block_table.shape[0], kv_cache.shape[1], q.shape[-2]
    rows = q.to(compute_dtype).reshape(-1, heads, q.shape[-1])
    listed = None if topk_indices is None else topk_indices.reshape(rows.shape[0], topk_indices.shape[-1])
    out = torch.zeros(*rows.shape[:-1], value_dim, dtype=compute_dtype, device=q.device)
    lse = torch.zeros(heads, rows.shape[0], dtype=compute_dtype, device=q.device)
    tokens = 1 if q.ndim == 3 else q.shape[1]
    starts = cu_seqlens_q.tolist() if cu_seqlens_q is not None else [tokens * i for i in range(num_seqs + 1)]
    for i, length in enumerate(seq_lens.tolist()):
        pages = block_table[i, : -(-length // page_size)].long()
        keys = _rows_of(kv_cache, pages)[:length].to(compute_dtype)
        if kv_scale is not None:
            keys = keys * (kv_scale.to(compute_dtype).reshape(()) if isinstance(kv_scale, Tensor) else kv_scale)
        step = max(1, _AT_A_TIME // max(1, heads * length))
        for first in range(starts[i], starts[i + 1], step):
            some = slice(first, min(first + step, starts[i + 1]))
            seen = _seen(some, length - starts[i + 1], length, causal, None if listed is None else listed[some], keys)
            out[some], lse[:, some] = _attend(rows[some], keys, seen, scale, value_dim, sinks)
    out = out.reshape(*q.shape[:-1], value_dim)
    if q.ndim == 4:
        lse = lse.reshape(heads, *q.shape[:2]).transpose(0, 1)
    return (out, lse) if return_lse else out


def _seen(rows: slice, shift: int, length: int, causal: bool, listed: Tensor | None, keys: Tensor) -> Tensor:
    """Which keys each of some rows sees: bool [rows, length]; row r is at position r + `shift`."""
    key = torch.arange(length, device=keys.device)
    position = torch.arange(rows.start, rows.stop, device=keys.device)[:, None] + shift
    seen = key <= position if causal else torch.ones_like(key <= position)
    if listed is None:
        return seen
    places = torch.where((listed >= 0) & (listed < length), listed, length).long()
    return seen & seen.new_zeros(len(places), length + 1).scatter_(1, places, True)[:, :length]


def _attend(
    q: Tensor, keys: Tensor, seen: Tensor, scale: float, value_dim: int, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Some rows of one sequence: [rows, heads, value_dim], and LSE [heads, rows]."""
    scores = torch.einsum("qhd,kd->hqk", q, keys) * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([sinks.to(keys.dtype)[:, None, None].expand(-1, scores.shape[1], 1), scores], 2)
        keys = torch.cat([keys.new_zeros(1, keys.shape[1]), keys])
    lse = torch.logsumexp(scores, 2)
    weights = torch.exp(scores - lse[..., None]).masked_fill(lse[..., None] == -torch.inf, 0.0)
    return torch.einsum("hqk,kd->qhd", weights, keys[:, :value_dim]), lse


def _rows_of(kv_cache: Tensor, pages: Tensor) -> Tensor:
    """[tokens, D] of some pages; torch before 2.9 cannot index float8 but by its bytes."""
    flat = kv_cache.reshape(*kv_cache.shape[:2], kv_cache.shape[-1])
    if flat.dtype.itemsize == 1:
        return flat.view(torch.uint8)[pages].view(flat.dtype).flatten(0, 1)
    return flat[pages].flatten(0, 1)
