"""New tokens and the caches that they go to, with the shapes of real models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.attention.problem import QUANTISED
from kernelhub.ops.kv_cache.problem import HND, NEOX, NHD


def write_kv_cache_inputs(
    *,
    tokens: int = 64,
    num_kv_heads: int = 8,
    head_dim_qk: int = 128,
    head_dim_vo: int | None = None,
    num_q_heads: int = 8,
    page_size: int = 16,
    spare_pages: int = 2,
    skipped: int = 3,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    kv_layout: str = NHD,
    rope: str | None = None,
    rotary_dim: int | None = None,
    rotates_q: bool = True,
    max_position: int = 97,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `write_kv_cache`: by default of Llama 3 8B.

    Args:
        num_q_heads: heads of q before k and v in the projection's result, of which these are views.
        skipped: every token whose number is a multiple of this is not to be written, as the padding of a CUDA graph
            is not; 0 for none.
        kv_dtype: that of the tokens unless given; float8 comes with float scales.
        rope: the style of a rotary embedding, ``"neox"`` or ``"interleaved"``; None for none.
        rotary_dim: columns that it rotates; by default all.
        rotates_q: q is rotated, too.
        max_position: rows of its cache.
    """
    random = torch.Generator(device="cpu").manual_seed(seed)
    wide = head_dim_qk if head_dim_vo is None else head_dim_vo
    num_pages = -(-tokens // page_size) + spare_pages
    slots = torch.randperm(num_pages * page_size, generator=random, device="cpu")[:tokens]
    if skipped:
        slots[skipped - 1 :: skipped] = -1

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float32, device="cpu")

    widths = [num_q_heads * head_dim_qk, num_kv_heads * head_dim_qk, num_kv_heads * wide]
    q, k, v = normal(tokens, sum(widths)).to(dtype).to(device).split(widths, 1)
    page = (page_size, num_kv_heads) if kv_layout == NHD else (num_kv_heads, page_size)
    arguments: dict[str, Any] = {
        "k": k.unflatten(1, (num_kv_heads, head_dim_qk)),
        "v": v.unflatten(1, (num_kv_heads, wide)),
        "k_cache": normal(num_pages, *page, head_dim_qk).to(kv_dtype or dtype).to(device),
        "v_cache": normal(num_pages, *page, wide).to(kv_dtype or dtype).to(device),
        "slot_mapping": slots.to(device),
    }
    if kv_dtype is not None and str(kv_dtype)[6:] in QUANTISED:
        arguments |= {"k_scale": 2.0**-6, "v_scale": 2.0**-5}
    if rope is not None:
        angle = torch.rand(
            max_position, (rotary_dim or head_dim_qk) // 2, generator=random, dtype=torch.float32, device="cpu"
        )
        angle = 6.28 * angle
        arguments |= {
            "positions": torch.randint(max_position, (tokens,), generator=random, device="cpu").to(device),
            "cos_sin_cache": torch.cat([angle.cos(), angle.sin()], 1).to(device),
            "is_neox": rope == NEOX,
        }
        if rotates_q:
            arguments["q"] = q.unflatten(1, (num_q_heads, head_dim_qk))
    return arguments | ({"kv_layout": HND} if kv_layout == HND else {})
