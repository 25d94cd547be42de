"""The page of a cache that holds keys and their scales: DeepGEMM's, vLLM's and SGLang's.

A page of n tokens of width D is n x D bytes of float8_e4m3fn values, then n float32 scales. As a tensor it is uint8
``[pages, n, D + 4]``, or with a dimension of 1 for the head before the last, though no row of it is a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4


def is_fused(k_cache: Tensor) -> bool:
    """Values and scales are in one tensor."""
    return k_cache.dtype is torch.uint8


def split_cache(k_cache: Tensor, k_scale_cache: Tensor | None, head_dim: int) -> tuple[Tensor, Tensor | None]:
    """Values [pages, n, D] and scales [pages, n]: those given, or views of a fused cache."""
    if not is_fused(k_cache):
        return k_cache, k_scale_cache
    pages, page_size = k_cache.shape[:2]
    # One row of bytes per page: strides of dimensions of one element, which may be anything, are left out.
    width = page_size * (head_dim + SCALE_BYTES)
    rows = k_cache.as_strided((pages, width), (k_cache.stride(0) if pages > 1 else width, 1))
    values = rows[:, : page_size * head_dim].view(torch.float8_e4m3fn).unflatten(1, (page_size, head_dim))
    return values, rows[:, page_size * head_dim :].view(torch.float32)


def fuse_cache(values: Tensor, scales: Tensor) -> Tensor:
    """A fused cache of float8_e4m3fn values [pages, n, D] and float32 scales [pages, n]."""
    pages, page_size, head_dim = values.shape
    parts = [values.contiguous().view(torch.uint8), scales.contiguous().view(torch.uint8)]
    joined = torch.cat([part.reshape(pages, -1) for part in parts], 1)
    return joined.view(pages, page_size, 1, head_dim + SCALE_BYTES)
