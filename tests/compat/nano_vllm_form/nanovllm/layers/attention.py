"""Attention over the batch's own keys, over pages of a cached prefix, or of one query over pages."""

from __future__ import annotations

import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor, nn

from nanovllm.utils.context import get_context


def store_kvcache(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    written = slot_mapping >= 0
    for new, cache in ((key, k_cache), (value, v_cache)):
        cache.flatten(0, 1)[slot_mapping[written].long()] = new[written]


class Attention(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.k_cache, self.v_cache = torch.empty(0), torch.empty(0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        step = get_context()
        if self.k_cache.numel():
            store_kvcache(k, v, self.k_cache, self.v_cache, step.slot_mapping)
        same = {"softmax_scale": self.scale, "causal": True, "block_table": step.block_tables}
        if not step.is_prefill:
            lens = step.context_lens
            return flash_attn_with_kvcache(q[:, None], self.k_cache, self.v_cache, cache_seqlens=lens, **same)
        if step.block_tables is not None:
            k, v = self.k_cache, self.v_cache
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        return flash_attn_varlen_func(q, k, v, **{name: getattr(step, name) for name in names}, **same)
