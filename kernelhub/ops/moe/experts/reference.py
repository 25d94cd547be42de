"""`fused_moe` in plain torch, an expert at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu

from kernelhub.ops.arguments import dtype_name
from kernelhub.ops.moe.experts.activations import Activations, inner_least
from kernelhub.ops.moe.experts.problem import (
    BLOCK_FORMATS,
    FLOATS,
    FP8,
    FP8_BLOCK,
    FP8_BLOCK_GATE_UP,
    FP8_FORMATS,
    GELU,
    GELU_TANH,
    SILU,
    SWIGLU_OAI,
    SWIGLU_STEP,
)
from kernelhub.ops.moe.experts.weights import Matrix, dequantized, format_of, matrix
from kernelhub.ops.precision import at_own_precision

# What joins gate and up is rounded to the dtype of the tokens before it is quantised.
ROUNDED_FIRST = (*FLOATS, FP8, FP8_BLOCK)


class Part(NamedTuple):
    """The contribution of one expert.

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


@at_own_precision
def fused_moe_reference(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = SILU,
    activation_dtype: torch.dtype | str | None = None,
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
    activation_dtype: torch.dtype | str | None = None,
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
    """The output of each expert, in order; experts without tokens give nothing."""
    layer = layer_of(w13, w2, w13_scale, w2_scale, w13_global_scale, w2_global_scale, w13_bias, w2_bias)
    activations = activations_of(layer.weights, activation_dtype, x.dtype)
    least, first = inner_least(activations.form), layer.w13

    local = local_ids(topk_ids, expert_map, w13.shape[0])
    for expert in range(w13.shape[0]):
        tokens, places = torch.nonzero(local == expert, as_tuple=True)
        if not len(tokens):
            continue
        router = topk_weights[tokens, places].to(dtype).unsqueeze(1)
        both = activations.rounded(x[tokens], a1_scale, dtype) @ dequantized(layer.weights, first, expert, dtype).t()
        if apply_router_weight_on_input:
            both, router = both * router, torch.ones_like(router)
        if first.bias is not None:
            both = both + first.bias[expert].to(dtype)
        if activations.form == FP8_BLOCK_GATE_UP:
            both = activations.rounded(both, None, dtype, least)
        inner = joined(both, activation, alpha, limit)
        if activations.form in ROUNDED_FIRST:
            inner = inner.to(x.dtype)
        inner = activations.rounded(inner, a2_scale, dtype, least)
        down = dequantized(layer.weights, layer.w2, expert, dtype)
        result = inner @ down.t()
        if layer.w2.bias is not None:
            result = result + layer.w2.bias[expert].to(dtype)
        yield Part(tokens, router, inner, down, result * router)


class Layer(NamedTuple):
    """The weights of a call in the form that kernels are given, and their format."""

    weights: str
    w13: Matrix
    w2: Matrix


def layer_of(
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    w13_global_scale: Tensor | None = None,
    w2_global_scale: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> Layer:
    """The layer of a checkpoint's tensors."""
    scale_shape = () if w13_scale is None else tuple(w13_scale.shape[1:])
    weights = format_of(w13.dtype, w13.shape[1], None if w13_scale is None else w13_scale.dtype, scale_shape)
    first = matrix(weights, w13, w13_scale, w13_global_scale, w13_bias)
    return Layer(weights, first, matrix(weights, w2, w2_scale, w2_global_scale, w2_bias))


def activations_of(weights: str, asked: torch.dtype | str | None, dtype: torch.dtype) -> Activations:
    """The rounding of activations that a call requests."""
    if asked is None:
        form = FP8 if weights in FP8_FORMATS else dtype_name(dtype)
    else:
        form = asked if isinstance(asked, str) else dtype_name(asked)
    return Activations(form, weights in BLOCK_FORMATS)


def local_ids(topk_ids: Tensor, expert_map: Tensor | None, num_experts: int) -> Tensor:
    """int64 ids of local experts; -1 for skipped ids."""
    ids = topk_ids.long()
    if expert_map is not None:
        known = (ids >= 0) & (ids < expert_map.shape[0])
        ids = torch.where(known, expert_map.long()[torch.where(known, ids, 0)], -1)
    return torch.where((ids >= 0) & (ids < num_experts), ids, -1)


def joined(both: Tensor, activation: str, alpha: float, limit: float) -> Tensor:
    """Gate and up [R, 2I] as what the down projection multiplies [R, I]."""
    gate, up = both.chunk(2, 1)
    gate = gate.clamp(min=torch.finfo(gate.dtype).min)  # of minus infinity every activation is 0, not NaN
    if activation == SILU:
        return gate * gate.sigmoid() * up
    if activation in (GELU, GELU_TANH):
        return gelu(gate, approximate="tanh" if activation == GELU_TANH else "none") * up
    up = up.clamp(-limit, limit)
    if activation == SWIGLU_STEP:
        return (gate * gate.sigmoid()).clamp(max=limit) * up
    gate = gate.clamp(max=limit)
    return gate * (alpha * gate).sigmoid() * (up + 1.0 if activation == SWIGLU_OAI else up)
