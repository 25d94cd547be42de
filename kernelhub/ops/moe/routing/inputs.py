"""Routings with the shapes of real models."""

from __future__ import annotations

from typing import Any

import torch

from kernelhub.ops.models.shapes import MOE, MoeModel


def routing_inputs(
    model: MoeModel | str = "deepseek-v3.2",
    *,
    tokens: int = 64,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `route_experts` for one layer of a model, by its name or written out."""
    model = MOE[model] if isinstance(model, str) else model
    random = torch.Generator(device="cpu").manual_seed(seed)
    logits = torch.randn(tokens, model.num_experts, generator=random, dtype=torch.float32, device="cpu")
    arguments: dict[str, Any] = {
        "logits": logits.to(dtype).to(device),
        "top_k": model.top_k,
        "scoring": model.scoring,
        "renormalize": model.renormalize,
        "scaling_factor": model.scaling_factor,
    }
    if model.num_groups > 1:
        arguments |= {"num_groups": model.num_groups, "topk_groups": model.topk_groups}
    if model.correction_bias:
        arguments["correction_bias"] = (
            0.2 * torch.randn(model.num_experts, generator=random, dtype=torch.float32, device="cpu")
        ).to(device)
    return arguments
