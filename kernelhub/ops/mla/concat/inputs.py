"""Keys of latent attention with the shapes of real models."""

from __future__ import annotations

from typing import Any

import torch


def concat_inputs(
    *,
    tokens: int = 64,
    num_heads: int = 128,
    nope_dim: int = 128,
    rope_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `concat_mla_k`: by default of DeepSeek-V3, whose k_nope is a view of what kv_b_proj gives."""
    random = torch.Generator(device="cpu").manual_seed(seed)
    kv = (
        torch.randn(tokens, num_heads, nope_dim + 128, generator=random, dtype=torch.float32, device="cpu")
        .to(dtype)
        .to(device)
    )
    k_rope = torch.randn(tokens, 1, rope_dim, generator=random, dtype=torch.float32, device="cpu").to(dtype).to(device)
    return {"k_nope": kv[..., :nope_dim], "k_rope": k_rope}
