"""Activations and weights to quantise, with the shapes of real models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.models.shapes import hidden_size

# (tokens of a prefill, hidden size).
SHAPES = {
    name: (2048, hidden_size(name))
    for name in ("llama-3.1-70b", "qwen3-30b-a3b", "deepseek-v3.2", "glm-5", "minimax-m2.5", "gpt-oss-120b")
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
