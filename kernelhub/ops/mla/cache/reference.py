"""`write_mla_cache` in plain torch, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.formats import E4M3, to_e4m3
from kernelhub.ops.precision import without_autocast


@without_autocast
def write_mla_cache_reference(
    kv_c: Tensor, k_rope: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: float | Tensor | None = None
) -> Tensor:
    """The op, but on a copy: the cache as it is after the call."""
    rows = torch.cat([kv_c, k_rope.reshape(k_rope.shape[0], k_rope.shape[-1])], 1)
    if kv_cache.dtype is E4M3:
        scale = torch.as_tensor(kv_scale, dtype=torch.float32, device=rows.device).reshape(())
        rows = to_e4m3(rows.float() / scale)
    written = kv_cache.clone()
    of_one_head = written.squeeze(2) if written.ndim == 4 else written
    for row, slot in zip(rows, slot_mapping.tolist(), strict=True):
        if slot >= 0:
            of_one_head[slot // kv_cache.shape[1], slot % kv_cache.shape[1]] = row
    return written
