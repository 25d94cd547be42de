"""Experts' weights in a kernel's own layout; see `kernelhub.ops.packed`.

A layer is two packed weights, which a call takes in place of w13 and w2. Each holds its scales and its bias: a layout
that moves rows moves those too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.problem import CHECKPOINT
from kernelhub.dispatch.selection import Selection
from kernelhub.ops.arguments import check_is_tensor
from kernelhub.ops.moe.experts.adapter import W2, W13
from kernelhub.ops.moe.experts.call import asked_by, key_of, problem_of
from kernelhub.ops.moe.experts.check import NAME, Operands, check, refuse
from kernelhub.ops.moe.experts.problem import ExpertsProblem
from kernelhub.ops.moe.experts.weights import PACKED_PARTS
from kernelhub.ops.packed import PackedWeight, remembered

_OF_LAYER = {
    "weights": W13,
    "num_experts": W13,
    "hidden_size": W13,
    "intermediate_size": W13,
    "w13_bias": "w13_bias",
    "w2_bias": "w2_bias",
}


def layer_of(
    problem: ExpertsProblem,
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor | None,
    w2_scale: Tensor | None,
    w13_global_scale: Tensor | None,
    w2_global_scale: Tensor | None,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
) -> Operands:
    """A layer's tensors as a call of the problem without tokens has them; an error if it has others."""
    for side, weight in ((W13, w13), (W2, w2)):
        check_is_tensor(NAME, side, weight)
    x = w13.new_empty((0, problem.hidden_size), dtype=getattr(torch, problem.dtype))
    ids = x.new_empty((0, problem.top_k), dtype=torch.int32)
    one = x.new_ones(1, dtype=torch.float32) if problem.static_scales else None
    given = Operands(
        x=x,
        w13=w13,
        w2=w2,
        topk_weights=ids.float(),
        topk_ids=ids,
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        w13_global_scale=w13_global_scale,
        w2_global_scale=w2_global_scale,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        a1_scale=one,
        a2_scale=one,
        alpha=1.0,
        limit=1.0,
        expert_map=None,
        residual=None,
        out=None,
    )
    activation_dtype = asked_by(problem)
    check(given, problem.activation, activation_dtype)
    key = key_of(given, problem.activation, activation_dtype, problem.apply_router_weight_on_input)
    mine = problem_of(key, w13.get_device())
    for name, parameter in _OF_LAYER.items():
        if getattr(mine, name) != getattr(problem, name):
            refuse(parameter, f"makes {name} {getattr(mine, name)}", f"the plan is for {name} {getattr(problem, name)}")
    return given


def packed(selection: Selection[Any], adapter: Any, layer: Operands) -> tuple[PackedWeight, PackedWeight]:
    """w13 and w2 of a layer that was checked, in the layout that the kernel packs to."""
    kernel = selection.kernel
    assert kernel is not None
    made = []
    for side in (W13, W2):
        parts = [getattr(layer, side + suffix) for suffix in ("", "_scale", "_global_scale", "_bias")]
        weight, scale = parts[:2]
        facts = {
            "side": side,
            "format": selection.problem.weights,
            "scale": None if scale is None else (scale.dtype, tuple(scale.shape)),
            "bias_dtype": None if parts[3] is None else parts[3].dtype,
        }
        if kernel.packs_to:
            tensors, unpacker = adapter.pack(side, *parts)
        else:
            tensors, unpacker = dict(zip(PACKED_PARTS, parts, strict=True)), None
        layout = kernel.packs_to or CHECKPOINT
        about = (tuple(weight.shape), weight.dtype, facts, unpacker)
        made.append(remembered(PackedWeight(layout, NAME, kernel.name, tensors, *about)))
    return made[0], made[1]


def with_packed(layer: Operands, w13: PackedWeight, w2: PackedWeight) -> Operands:
    """The layer with packed weights in place of its own."""
    return layer._replace(
        w13=w13,
        w2=w2,
        w13_scale=None,
        w2_scale=None,
        w13_global_scale=None,
        w2_global_scale=None,
        w13_bias=None,
        w2_bias=None,
    )
