"""Experts and tokens with the shapes of real models."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.formats import E2M1_MAX, E4M3_MAX, INT4_MAX, from_e8m0, to_e2m1, to_e4m3, to_e8m0_up, to_int4
from kernelhub.ops.models.shapes import MOE, MoeModel
from kernelhub.ops.moe.experts.problem import (
    BLOCK_FORMATS,
    FP8_BLOCK_UE8M0,
    FP8_CHANNEL,
    FP8_TENSOR,
    MXFP4,
    MXINT4,
    NVFP4,
    PLAIN,
)
from kernelhub.ops.moe.experts.weights import BLOCK, GROUP
from kernelhub.ops.precision import without_autocast

# Magnitudes that random tokens, and the results of the activation, hardly exceed.
_LARGEST_X, _LARGEST_INNER = 6.0, 16.0


def moe_inputs(
    model: MoeModel | str = "qwen3-30b-a3b",
    *,
    tokens: int = 4,
    tensor_parallel: int = 1,
    weights: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
    activation_dtype: torch.dtype | str | None = None,
    **sizes: Any,
) -> dict[str, Any]:
    """Arguments of `fused_moe` for one layer of a model, by its name or written out.

    Args:
        model: the model, with its activation, its biases and the format it is published in.
        tokens: rows of x.
        tensor_parallel: ranks that share the width of an expert.
        weights: another format.
        dtype: of the tokens.
        device: where the tensors are made; random numbers differ between kinds of device.
        seed: of the random numbers.
        activation_dtype: as of `fused_moe`; ``"nvfp4"`` comes with second scales that fit.
        sizes: other figures of the model: ``num_experts=8``, ``hidden_size=64``, ...
    """
    model = dataclasses.replace(MOE[model] if isinstance(model, str) else model, **sizes)
    weights = model.weights if weights is None else weights
    random = torch.Generator(device).manual_seed(seed)
    experts, hidden, inner = model.num_experts, model.hidden_size, model.intermediate_size // tensor_parallel

    def normal(*shape: int, size: float = 1.0) -> Tensor:
        return size * torch.randn(shape, generator=random, device=device, dtype=torch.float32)

    arguments: dict[str, Any] = {"x": normal(tokens, hidden).to(dtype)}
    for name, rows, columns in (("w13", 2 * inner, hidden), ("w2", hidden, inner)):
        parts = [quantized(normal(rows, columns, size=columns**-0.5), weights, dtype) for _ in range(experts)]
        arguments |= {
            name + suffix: _stack([part[place] for part in parts])
            for place, suffix in enumerate(("", "_scale", "_global_scale"))
            if parts[0][place] is not None
        }
        if model.bias:
            arguments[name + "_bias"] = normal(experts, rows, size=0.5).to(dtype)
    scores = torch.rand(tokens, experts, generator=random, device=device, dtype=torch.float32)
    best = scores.topk(model.top_k, 1)
    arguments["topk_ids"] = best.indices.int()
    arguments["topk_weights"] = best.values / best.values.sum(1, keepdim=True)
    if model.activation != "silu":
        arguments["activation"] = model.activation
    if activation_dtype is not None:
        arguments["activation_dtype"] = activation_dtype
    if activation_dtype == NVFP4:
        for name, largest in (("a1_scale", _LARGEST_X), ("a2_scale", _LARGEST_INNER)):
            arguments[name] = torch.full((1,), largest / (E2M1_MAX * E4M3_MAX), device=device, dtype=torch.float32)
    return arguments


def quantized(weight: Tensor, weights: str, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """One expert's float32 weights [N, K] in a format: weights, scale, global scale."""
    rows, columns = weight.shape
    if weights == PLAIN:
        return weight.to(dtype), None, None
    if weights == FP8_TENSOR:
        scale = weight.abs().amax() / E4M3_MAX
        return to_e4m3(weight / scale), scale, None
    if weights == FP8_CHANNEL:
        scale = weight.abs().amax(1) / E4M3_MAX
        return to_e4m3(weight / scale.unsqueeze(1)), scale, None
    if weights in BLOCK_FORMATS:
        down, across = -(-rows // BLOCK), -(-columns // BLOCK)
        whole = torch.nn.functional.pad(weight, (0, across * BLOCK - columns, 0, down * BLOCK - rows))
        scale = whole.view(down, BLOCK, across, BLOCK).abs().amax((1, 3)) / E4M3_MAX
        kept = to_e8m0_up(scale) if weights == FP8_BLOCK_UE8M0 else scale
        scale = from_e8m0(kept) if weights == FP8_BLOCK_UE8M0 else scale
        spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
        return to_e4m3(weight / spread), kept, None
    groups = weight.unflatten(1, (-1, GROUP[weights]))
    largest = groups.abs().amax(2)
    if weights == MXFP4:
        kept = to_e8m0_up(largest / E2M1_MAX)
        return to_e2m1((groups / from_e8m0(kept).unsqueeze(2)).flatten(1)), kept, None
    if weights == MXINT4:
        rounded = (largest / INT4_MAX).clamp(min=2.0**-100).to(torch.bfloat16)
        return to_int4((groups / rounded.float().unsqueeze(2)).flatten(1)), rounded, None
    global_scale = largest.amax() / (E2M1_MAX * E4M3_MAX)
    kept = to_e4m3(largest / E2M1_MAX / global_scale)
    codes = groups / (kept.float() * global_scale).unsqueeze(2).clamp(min=1e-30)
    return to_e2m1(codes.flatten(1)), kept, global_scale


@without_autocast
def _stack(parts: list[Tensor | None]) -> Tensor:
    given = [part for part in parts if part is not None]
    if given[0].dtype.itemsize == 1:  # torch stacks no float8 on some devices
        return torch.stack([part.view(torch.uint8) for part in given]).view(given[0].dtype)
    return torch.stack(given)
