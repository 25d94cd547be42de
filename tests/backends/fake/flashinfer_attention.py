"""Attention in torch with FlashInfer's conventions, and what its kernels ask of tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sm_scale: float,
    causal: bool,
    window_left: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """[T, H, D] and [S, KH, D] -> [T, H, DV] and an LSE to base 2 of [T, H]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k)
    if softcap:
        scores, sm_scale = softcap * torch.tanh(scores * sm_scale / softcap), 1.0
    position = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    key = torch.arange(k.shape[0])
    hidden = (key > position) & causal | (window_left >= 0) & (key < position - window_left)
    scores = torch.where(hidden, -5e4, scores) * sm_scale
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, q.shape[0], 1)], 2)
        v = torch.cat([v, v.new_zeros(1, *v.shape[1:])])
    lse = torch.logsumexp(scores, 2)
    out = torch.einsum("hqk,khd->qhd", torch.softmax(scores, 2), v)
    blind = hidden.all(1)
    out[blind] = torch.nan
    return out, torch.where(blind[:, None], torch.nan, lse.t() / math.log(2.0))


def check_rows(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.stride(-1) == 1, "rows lie side by side"
        assert all(stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:-1]), "16 bytes"
        assert tensor.data_ptr() % 16 == 0, "16 bytes"


def check_out(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert out.shape == shape
    assert out.dtype is dtype
    assert out.is_contiguous(), "out is written as one piece"


def paged(cache: Tensor, pages: Tensor, length: int, kv_layout: str) -> Tensor:
    cache = cache.transpose(1, 2) if kv_layout == "HND" else cache
    return cache.float()[pages.long()].flatten(0, 1)[:length]
