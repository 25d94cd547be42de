"""One sequence at a time: where its rows and keys are, and its pages gathered.

The torch kernels run a batch as a loop over single sequences; they differ only in how one is attended.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernelhub.ops.attention.adapter import DenseStep, PagedStep
from kernelhub.ops.attention.arguments import Scale
from kernelhub.runtime.scratch import scratch

# q [S, H, D], k [L, KH, D], v [L, KH, DV], out [S, H, DV], lse [H, S] or None
Sequence = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


def dense_sequences(
    q: Tensor, k: Tensor, v: Tensor, step: DenseStep, out: Tensor, lse: Tensor | None
) -> Iterator[Sequence]:
    """The sequences of an `attention` call, batched or ragged; those without queries are left out."""
    if step.cu_seqlens_q is None:
        for i in range(q.shape[0]):
            yield q[i], k[i], v[i], out[i], None if lse is None else lse[i]
        return
    starts_q, starts_k = step.q_offsets(), step.k_offsets()
    for i in range(step.num_seqs):
        rows, keys = slice(starts_q[i], starts_q[i + 1]), slice(starts_k[i], starts_k[i + 1])
        if rows.stop > rows.start:
            yield q[rows], k[keys], v[keys], out[rows], None if lse is None else lse[:, rows]


def paged_sequences(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, step: PagedStep, out: Tensor, lse: Tensor | None
) -> Iterator[Sequence]:
    """The sequences of a `paged_attention` call over NHD caches; k and v live until the next is asked for."""
    lengths = step.lengths()
    starts = step.q_offsets() if step.cu_seqlens_q is not None else list(range(step.num_seqs + 1))
    for i in range(step.num_seqs):
        if q.ndim == 4:
            rows, out_i, lse_i = q[i], out[i], None if lse is None else lse[i]
        else:
            span = slice(starts[i], starts[i + 1])
            rows, out_i, lse_i = q[span], out[span], None if lse is None else lse[:, span]
        if rows.shape[0]:
            pages = step.block_table[i, : -(-lengths[i] // k_cache.shape[1])].long()
            k, v = gathered("k", k_cache, pages), gathered("v", v_cache, pages)
            yield rows, k[: lengths[i]], v[: lengths[i]], out_i, lse_i


def gathered(tag: str, cache: Tensor, pages: Tensor) -> Tensor:
    """Pages [P] of an NHD cache as [P * page_size, KH, D]: a view where they are adjacent, else a copy."""
    count = pages.numel()
    if count:
        first = int(pages[0])
        if count == 1 or bool((pages == torch.arange(first, first + count, device=pages.device)).all()):
            return cache[first : first + count].flatten(0, 1)
    into = scratch(tag, (count, *cache.shape[1:]), cache.dtype, cache.device)
    torch.index_select(cache, 0, pages, out=into)
    return into.flatten(0, 1)


def nhd(cache: Tensor, kv_layout: str) -> Tensor:
    """A cache of either layout as [num_pages, page_size, KH, D]."""
    return cache.transpose(1, 2) if kv_layout == "HND" else cache


def dequantized(tensor: Tensor, scale: Scale, dtype: torch.dtype) -> Tensor:
    """[..., KH, D] in `dtype`, times its scale: none, one, or one per KV head."""
    tensor = tensor.to(dtype)
    if scale is None:
        return tensor
    return tensor * (scale.to(dtype).reshape(-1, 1) if isinstance(scale, Tensor) else scale)
