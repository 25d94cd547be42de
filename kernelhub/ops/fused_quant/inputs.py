"""Rows before a product, with the shapes of real models."""

from __future__ import annotations

from typing import Any

import torch

from kernelhub.ops.quant.inputs import SHAPES, activations


def norm_inputs(
    *,
    model: str = "deepseek-v3.2",
    tokens: int | None = None,
    width: int | None = None,
    format: str | None = "fp8_group",
    residual: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `rms_norm_quant`: the hidden states of a prefill, as what a layer gave and the residual."""
    rows, columns = SHAPES[model]
    shape = (rows if tokens is None else tokens, columns if width is None else width)
    weight = 1.0 + 0.1 * activations(shape[1], dtype=torch.float32, seed=seed + 1) / 20.0
    made: dict[str, Any] = {
        "x": activations(*shape, dtype=dtype, device=device, seed=seed),
        "weight": weight.to(weight_dtype or dtype).to(device),
    }
    if residual:
        made["residual"] = activations(*shape, dtype=dtype, device=device, seed=seed + 2)
    return made | form_of(format, device)


def activation_inputs(
    *,
    tokens: int = 2048,
    width: int = 2048,
    format: str | None = "fp8_group",
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `silu_and_mul_quant`: gate and up of a prefill, by default of an expert of DeepSeek-V3."""
    x = activations(tokens, 2 * width, dtype=torch.float32, seed=seed) / 4.0
    return {"x": x.to(dtype).to(device)} | form_of(format, device)


def form_of(format: str | None, device: torch.device | str) -> dict[str, Any]:
    """The form of the result, with the scale that it is given."""
    size = {"fp8_tensor": ("scale", 0.02), "nvfp4": ("global_scale", 0.004)}.get(format or "")
    given = {} if size is None else {size[0]: torch.full((1,), size[1], dtype=torch.float32, device=device)}
    return {"format": format, **given} if format is not None else given
