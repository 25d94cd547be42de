"""Activations and weights to quantise, with the shapes of real models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# (tokens of a prefill, hidden size), from the config.json of each.
SHAPES = {
    "llama-3.1-70b": (2048, 8192),
    "qwen3-30b-a3b": (2048, 2048),
    "deepseek-v3.2": (2048, 7168),
    "glm-5": (2048, 6144),
    "minimax-m2.5": (2048, 3072),
    "gpt-oss-120b": (2048, 2880),
}


def activations(
    *shape: int, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu", seed: int = 0
) -> Tensor:
    """Normal values with a few large columns, as activations have; equal seeds give equal tensors on every device."""
    random = torch.Generator(device="cpu").manual_seed(seed)
    x = torch.randn(*shape, generator=random, dtype=torch.float32, device="cpu")
    x[..., ::97] *= 20.0
    return x.to(dtype).to(device)


def quantize_inputs(
    *,
    model: str = "deepseek-v3.2",
    tokens: int | None = None,
    width: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of a quantiser: the hidden states of a prefill."""
    rows, columns = SHAPES[model]
    shape = (rows if tokens is None else tokens, columns if width is None else width)
    return {"x": activations(*shape, dtype=dtype, device=device, seed=seed)}
