"""`fused_moe` in plain torch, an expert at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu

from kernelhub.ops.formats import E4M3, E4M3_MAX, to_e4m3
from kernelhub.ops.moe.experts.problem import (
    BLOCK_FORMATS,
    FP8_FORMATS,
    GELU,
    GELU_TANH,
    SILU,
)
from kernelhub.ops.moe.experts.weights import BLOCK, Matrix, dequantized, format_of, matrix

SMALLEST_AMAX = 1e-10


class Part(NamedTuple):
    """What one expert adds.

    Attributes:
        tokens: [R], which tokens go to it.
        weights: [R, 1], by how much; ones where the router's weight came before.
        inner: [R, I], what the down projection multiplies.
        w2: [H, I], the down projection.
        result: [R, H], what is added to the tokens.
    """

    tokens: Tensor
    weights: Tensor
    inner: Tensor
    w2: Tensor
    result: Tensor


def fused_moe_reference(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = SILU,
    activation_dtype: torch.dtype | None = None,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    w13_global_scale: Tensor | None = None,
    w2_global_scale: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    apply_router_weight_on_input: bool = False,
    expert_map: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The op, computed in `dtype` and returned in it; arguments as of the op, the destination ignored."""
    result = torch.zeros(x.shape, dtype=dtype, device=x.device) if residual is None else residual.to(dtype)
    for part in parts_of(
        x,
        w13,
        w2,
        topk_weights,
        topk_ids,
        activation=activation,
        activation_dtype=activation_dtype,
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        w13_global_scale=w13_global_scale,
        w2_global_scale=w2_global_scale,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        a1_scale=a1_scale,
        a2_scale=a2_scale,
        alpha=alpha,
        limit=limit,
        apply_router_weight_on_input=apply_router_weight_on_input,
        expert_map=expert_map,
        dtype=dtype,
    ):
        result = result.index_add(0, part.tokens, part.result)
    return result


def parts_of(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = SILU,
    activation_dtype: torch.dtype | None = None,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    w13_global_scale: Tensor | None = None,
    w2_global_scale: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    apply_router_weight_on_input: bool = False,
    expert_map: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Iterator[Part]:
    """What each expert adds, in the order of experts; one that has no token gives nothing."""
    scale_shape = () if w13_scale is None else tuple(w13_scale.shape[1:])
    weights = format_of(w13.dtype, w13.shape[1], None if w13_scale is None else w13_scale.dtype, scale_shape)
    first: Matrix = matrix(weights, w13, w13_scale, w13_global_scale, w13_bias)
    second: Matrix = matrix(weights, w2, w2_scale, w2_global_scale, w2_bias)
    quantized = weights in FP8_FORMATS if activation_dtype is None else activation_dtype is E4M3
    grouped = weights in BLOCK_FORMATS

    def multiplied(rows: Tensor, scale: Tensor | None) -> Tensor:
        return fp8_values(rows, scale, grouped, dtype) if quantized else rows.to(dtype)

    local = local_ids(topk_ids, expert_map, w13.shape[0])
    for expert in range(w13.shape[0]):
        tokens, places = torch.nonzero(local == expert, as_tuple=True)
        if not len(tokens):
            continue
        router = topk_weights[tokens, places].to(dtype).unsqueeze(1)
        both = multiplied(x[tokens], a1_scale) @ dequantized(weights, first, expert, dtype).t()
        if apply_router_weight_on_input:
            both, router = both * router, torch.ones_like(router)
        if first.bias is not None:
            both = both + first.bias[expert].to(dtype)
        inner = multiplied(joined(both, activation, alpha, limit).to(x.dtype), a2_scale)
        down = dequantized(weights, second, expert, dtype)
        result = inner @ down.t()
        if second.bias is not None:
            result = result + second.bias[expert].to(dtype)
        yield Part(tokens, router, inner, down, result * router)


def local_ids(topk_ids: Tensor, expert_map: Tensor | None, num_experts: int) -> Tensor:
    """int64 ids of experts that are here; -1 where a choice is left out."""
    ids = topk_ids.long()
    if expert_map is not None:
        known = (ids >= 0) & (ids < expert_map.shape[0])
        ids = torch.where(known, expert_map.long()[torch.where(known, ids, 0)], -1)
    return torch.where((ids >= 0) & (ids < num_experts), ids, -1)


def joined(both: Tensor, activation: str, alpha: float, limit: float) -> Tensor:
    """Gate and up [R, 2I] as what the down projection multiplies [R, I]."""
    gate, up = both.chunk(2, 1)
    if activation == SILU:
        return gate * gate.sigmoid() * up
    if activation in (GELU, GELU_TANH):
        return gelu(gate, approximate="tanh" if activation == GELU_TANH else "none") * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * (alpha * gate).sigmoid() * (up + 1.0)


def fp8_values(rows: Tensor, scale: Tensor | None, grouped: bool, dtype: torch.dtype) -> Tensor:
    """Rows [R, K] as the values that their fp8 codes and scales mean.

    A scale that is not given is the largest magnitude, at least 1e-10, over 448: of each 1 x 128, or of each row.
    """
    values = rows.float()
    if scale is not None:
        factor = scale.float().reshape(1, 1)
        return to_e4m3(values / factor).to(dtype) * factor.to(dtype)
    count, width = values.shape
    if not grouped:
        factor = values.abs().amax(1, keepdim=True).clamp(min=SMALLEST_AMAX) / E4M3_MAX
        return to_e4m3(values / factor).to(dtype) * factor.to(dtype)
    whole = -(-width // BLOCK) * BLOCK
    groups = torch.nn.functional.pad(values, (0, whole - width)).unflatten(1, (-1, BLOCK))
    factor = groups.abs().amax(2, keepdim=True).clamp(min=SMALLEST_AMAX) / E4M3_MAX
    whole_rows: Tensor = (to_e4m3(groups / factor).to(dtype) * factor.to(dtype)).view(count, whole)
    return whole_rows[:, :width]
