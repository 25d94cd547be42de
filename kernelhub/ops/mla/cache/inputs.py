"""New tokens and the cache that they go to, with the shapes of real models."""

from __future__ import annotations

from typing import Any

import torch


def write_mla_cache_inputs(
    *,
    tokens: int = 64,
    latent_dim: int = 512,
    rope_dim: int = 64,
    page_size: int = 64,
    spare_pages: int = 2,
    skipped: int = 3,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `write_mla_cache`: by default of DeepSeek-V3.

    Args:
        skipped: every token whose number is a multiple of this is not to be written, as the padding of a CUDA graph
            is not; 0 for none.
        kv_dtype: that of the tokens unless given; float8_e4m3fn comes with a float scale.
    """
    random = torch.Generator(device="cpu").manual_seed(seed)
    num_pages = -(-tokens // page_size) + spare_pages
    slots = torch.randperm(num_pages * page_size, generator=random, device="cpu")[:tokens]
    if skipped:
        slots[skipped - 1 :: skipped] = -1
    cache = torch.randn(
        num_pages, page_size, latent_dim + rope_dim, generator=random, dtype=torch.float32, device="cpu"
    )
    # A view of the down-projection's result, which also contains the rotary part.
    projected = (
        torch.randn(tokens, latent_dim + rope_dim, generator=random, dtype=torch.float32, device="cpu")
        .to(dtype)
        .to(device)
    )
    arguments: dict[str, Any] = {
        "kv_c": projected[:, :latent_dim],
        "k_rope": projected[:, latent_dim:],
        "kv_cache": cache.to(kv_dtype or dtype).to(device),
        "slot_mapping": slots.to(device),
    }
    return arguments | ({"kv_scale": 2.0**-6} if kv_dtype is torch.float8_e4m3fn else {})
