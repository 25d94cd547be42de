"""States to merge, with the shapes of real models."""

from __future__ import annotations

from typing import Any

import torch


def merge_inputs(
    *,
    parts: int = 2,
    tokens: int = 64,
    batch: int | None = None,
    num_heads: int = 128,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    empty: bool = True,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `merge_attention_states`: by default a chunk of DeepSeek V3's prefill, 128 heads of 128.

    Args:
        parts: states to merge.
        tokens: per sequence.
        batch: sequences; None for states of [T, H, D].
        num_heads: heads.
        head_dim: width of a head.
        dtype: of the results.
        device: where the tensors are made.
        empty: let some rows have no keys in a part, or in any, marked by -inf or +inf, their results by NaN.
        seed: of the random numbers, which are the same for every device.
    """
    random = torch.Generator(device="cpu").manual_seed(seed)
    rows = (tokens,) if batch is None else (batch, tokens)
    outs, lses = [], []
    for part in range(parts):
        out = torch.randn(*rows, num_heads, head_dim, generator=random, dtype=torch.float32, device="cpu")
        lse = 4.0 * torch.randn(*rows, num_heads, generator=random, dtype=torch.float32, device="cpu") + 2.0 * part
        if empty:
            kind = torch.randint(0, 8, (*rows, num_heads), generator=random, device="cpu")
            kind[..., :2, :] = 0  # no keys in any part
            lse = torch.where(kind == 0, -torch.inf, torch.where(kind == 1, torch.inf, lse))
            out = torch.where(((kind == 0) | (kind == 1)).unsqueeze(-1), torch.nan, out)
        outs.append(out.to(dtype).to(device))
        lses.append(lse.transpose(-1, -2).contiguous().to(device))
    return {"outs": outs, "lses": lses}
