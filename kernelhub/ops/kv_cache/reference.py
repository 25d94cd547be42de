"""`write_kv_cache` in plain torch, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.formats import E4M3, E5M2, to_e4m3, to_e5m2
from kernelhub.ops.kv_cache.problem import NHD
from kernelhub.ops.kv_cache.rope import has_row, rotated, style_of


def encoded(values: Tensor, scale: float | Tensor | None, dtype: torch.dtype) -> Tensor:
    """Keys or values [T, KH, D] in the dtype of the cache. A number is divided by as a tensor: CUDA would multiply."""
    if dtype not in (E4M3, E5M2):
        return values
    if isinstance(scale, Tensor):
        divisor = scale.reshape(()) if scale.numel() == 1 else scale.reshape(-1, 1)
    else:
        divisor = torch.full((), 1.0 if scale is None else scale, dtype=torch.float32, device=values.device)
    return (to_e4m3 if dtype is E4M3 else to_e5m2)(values.float() / divisor)


def write_kv_cache_reference(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    kv_layout: str = NHD,
    q: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    is_neox: bool = True,
) -> tuple[Tensor, ...]:
    """The op, but on copies: the caches, and q if it is given, as they are after the call."""
    written = []
    style = style_of(cos_sin_cache, is_neox)
    if style is not None and positions is not None and cos_sin_cache is not None:
        k = rotated(k, positions, cos_sin_cache, style)
        q = None if q is None else rotated(q, positions, cos_sin_cache, style)
        slot_mapping = torch.where(has_row(positions, cos_sin_cache), slot_mapping, -1)
    for values, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        rows, copy = encoded(values, scale, cache.dtype), cache.clone()
        pages = copy if kv_layout == NHD else copy.transpose(1, 2)
        for row, slot in zip(rows, slot_mapping.tolist(), strict=True):
            if slot >= 0:
                pages[slot // pages.shape[1], slot % pages.shape[1]] = row
        written.append(copy)
    return (written[0], written[1]) if q is None else (written[0], written[1], q)
