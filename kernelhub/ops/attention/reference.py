"""The attention ops in plain torch: written to be obviously right, not to be fast.

Computed in float32, or float64 on request; one sequence at a time. Every kernel is compared with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.attention.arguments import Scale, Window, window_pair
from kernelhub.ops.precision import at_own_precision

_AT_A_TIME = 1 << 25  # scores: 256 MB of float64


@at_own_precision
def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    return_lse: bool = False,
    compute_dtype: torch.dtype = torch.float32,
) -> Any:
    """`attention` in plain torch: same arguments and layouts; results stay in `compute_dtype`."""
    features = _Features(q, causal, window, softcap, sinks, scale, compute_dtype)
    k = _dequantized(k, k_scale, compute_dtype)
    v = _dequantized(v, v_scale, compute_dtype)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        results = [_attend(q[b], k[b], v[b], features) for b in range(q.shape[0])]
        out = torch.stack([out for out, _ in results]) if results else q.new_zeros((*q.shape[:-1], v.shape[-1]))
        lse = torch.stack([lse for _, lse in results]) if results else q.new_zeros(0, q.shape[2], q.shape[1])
        return (out, lse) if return_lse else out
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=compute_dtype, device=q.device)
    lse = torch.zeros(q.shape[1], q.shape[0], dtype=compute_dtype, device=q.device)
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(len(starts_q) - 1):
        rows, keys = slice(starts_q[i], starts_q[i + 1]), slice(starts_k[i], starts_k[i + 1])
        out[rows], lse[:, rows] = _attend(q[rows], k[keys], v[keys], features)
    return (out, lse) if return_lse else out


@at_own_precision
def paged_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = True,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    compute_dtype: torch.dtype = torch.float32,
) -> Any:
    """`paged_attention` in plain torch: same arguments and layouts; results stay in `compute_dtype`."""
    features = _Features(q, causal, window, softcap, sinks, scale, compute_dtype)
    if kv_layout == "HND":
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    num_seqs, page_size = block_table.shape[0], k_cache.shape[1]
    tokens = 1 if q.ndim == 3 else q.shape[1]
    starts = cu_seqlens_q.tolist() if cu_seqlens_q is not None else [tokens * i for i in range(num_seqs + 1)]
    rows_of_q = q.reshape(-1, *q.shape[-2:])
    out = torch.zeros(*rows_of_q.shape[:-1], v_cache.shape[-1], dtype=compute_dtype, device=q.device)
    lse = torch.zeros(rows_of_q.shape[1], rows_of_q.shape[0], dtype=compute_dtype, device=q.device)
    for i, length in enumerate(seq_lens.tolist()):
        pages = block_table[i, : -(-length // page_size)].long()
        k = _dequantized(_tokens(k_cache, pages)[:length], k_scale, compute_dtype)
        v = _dequantized(_tokens(v_cache, pages)[:length], v_scale, compute_dtype)
        rows = slice(starts[i], starts[i + 1])
        out[rows], lse[:, rows] = _attend(rows_of_q[rows], k, v, features)
    out = out.reshape(*q.shape[:-1], v_cache.shape[-1])
    if q.ndim == 4:
        lse = lse.reshape(q.shape[2], q.shape[0], q.shape[1]).transpose(0, 1)
    return (out, lse) if return_lse else out


class _Features:
    """The features of a call with their values, in normal form."""

    def __init__(
        self,
        q: Tensor,
        causal: bool,
        window: Window,
        softcap: float | None,
        sinks: Tensor | None,
        scale: float | None,
        dtype: torch.dtype,
    ) -> None:
        self.left, self.right = (-1, -1) if window is None else window_pair("reference", window)
        if causal:
            self.right = 0
        self.softcap = softcap or 0.0
        self.sinks = None if sinks is None else sinks.to(dtype)
        self.scale = q.shape[-1] ** -0.5 if scale is None else scale
        self.dtype = dtype


def _attend(q: Tensor, k: Tensor, v: Tensor, features: _Features) -> tuple[Tensor, Tensor]:
    """One sequence: q [S, H, D], k [SK, KH, D], v [SK, KH, DV] -> out [S, H, DV], lse [H, S]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    step = max(1, _AT_A_TIME // max(1, q.shape[1] * k.shape[0]))
    first = k.shape[0] - q.shape[0]
    parts = [
        _attend_some(q[row : row + step], k, v, first + row, features) for row in range(0, max(1, q.shape[0]), step)
    ]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)


def _attend_some(q: Tensor, k: Tensor, v: Tensor, first: int, features: _Features) -> tuple[Tensor, Tensor]:
    """Some rows of a sequence, the first of which is at position `first` among the keys."""
    q = q.to(features.dtype)
    scores = torch.einsum("qhd,khd->hqk", q, k) * features.scale
    if features.softcap:
        scores = features.softcap * torch.tanh(scores / features.softcap)
    position = torch.arange(q.shape[0], device=q.device)[:, None] + first
    key = torch.arange(k.shape[0], device=q.device)[None, :]
    if features.left >= 0:
        scores = scores.masked_fill(key < position - features.left, -torch.inf)
    if features.right >= 0:
        scores = scores.masked_fill(key > position + features.right, -torch.inf)
    if features.sinks is not None:
        scores = torch.cat([features.sinks[:, None, None].expand(-1, q.shape[0], 1), scores], dim=2)
        v = torch.cat([torch.zeros_like(v[:1]) if v.shape[0] else v.new_zeros(1, *v.shape[1:]), v])
    lse = torch.logsumexp(scores, dim=2)
    weights = torch.exp(scores - lse[..., None]).masked_fill(lse[..., None] == -torch.inf, 0.0)
    return torch.einsum("hqk,khd->qhd", weights, v), lse


def _tokens(cache: Tensor, pages: Tensor) -> Tensor:
    """Pages of a cache one after the other; torch before 2.9 cannot index float8 but by its bytes."""
    if cache.dtype.itemsize == 1:
        return cache.view(torch.uint8)[pages].view(cache.dtype).flatten(0, 1)
    return cache[pages].flatten(0, 1)


def _dequantized(tensor: Tensor, scale: Scale, dtype: torch.dtype) -> Tensor:
    """[..., KH, D] times its scale: none, one, or one per head."""
    tensor = tensor.to(dtype)
    if isinstance(scale, Tensor):
        scale = scale.to(dtype).reshape(-1, 1)
    return tensor if scale is None else tensor * scale
