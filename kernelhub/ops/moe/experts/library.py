"""The op under torch.compile, torch.export and fake tensors; see `kernelhub.ops.attention.library`.

Packed weights cross the operator as their tensors, and what tells them in words.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.op import Backend
from kernelhub.ops.arguments import dtype_name, plain
from kernelhub.ops.moe.experts.problem import ASKED_FORMATS
from kernelhub.ops.moe.experts.weights import PACKED_PARTS
from kernelhub.ops.operands import check_operand
from kernelhub.ops.operators import define, names_of
from kernelhub.ops.packed import PackedWeight

# In the order of the operators, and of `_OPERANDS` below.
_POSITIONAL = ("x", "w13", "w2", "topk_weights", "topk_ids")
_NAMES = (
    *_POSITIONAL,
    "activation",
    "activation_dtype",
    "w13_scale",
    "w2_scale",
    "w13_global_scale",
    "w2_global_scale",
    "w13_bias",
    "w2_bias",
    "a1_scale",
    "a2_scale",
    "alpha",
    "limit",
    "apply_router_weight_on_input",
    "expert_map",
    "residual",
    "packed",
    "backend",
)


def fused_moe(
    x: Tensor,
    w13: Tensor | PackedWeight,
    w2: Tensor | PackedWeight,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = "silu",
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
    backend: Backend = None,
) -> Tensor:
    """`kernelhub.fused_moe` through its operator."""
    if x.is_nested:
        check_operand("fused_moe", "x", x)
    packed: list[str] = []
    if isinstance(w13, PackedWeight) and isinstance(w2, PackedWeight):
        packed = [*_told(w13), *_told(w2)]
        w13, w13_scale, w13_global_scale, w13_bias = _parts(w13)
        w2, w2_scale, w2_global_scale, w2_bias = _parts(w2)
    arguments = (
        x,
        w13,
        w2,
        topk_weights,
        topk_ids,
        activation,
        dtype_name(activation_dtype) if isinstance(activation_dtype, torch.dtype) else activation_dtype,
        w13_scale,
        w2_scale,
        w13_global_scale,
        w2_global_scale,
        w13_bias,
        w2_bias,
        a1_scale,
        a2_scale,
        alpha,
        limit,
        apply_router_weight_on_input,
        expert_map,
        residual,
        packed,
        names_of(backend),
    )
    if out is None:
        made: Tensor = torch.ops.kernelhub.fused_moe.default(*arguments)
        return made
    if out is residual or out is x:  # an operator may write no operand that is also read by another name
        torch.ops.kernelhub.fused_moe_out.default(*_apart(arguments, out), out)
        return out
    torch.ops.kernelhub.fused_moe_out.default(*arguments, out)
    return out


def _apart(arguments: tuple[Any, ...], out: Tensor) -> tuple[Any, ...]:
    """The arguments with a copy of what `out` is."""
    return tuple(item.clone() if item is out else item for item in arguments)


def _functional(*arguments: Any) -> Tensor:
    return _eager(arguments, None)


def _mutating(*arguments: Any) -> None:
    _eager(arguments[:-1], arguments[-1])


def _eager(arguments: tuple[Any, ...], out: Tensor | None) -> Tensor:
    from kernelhub.ops.moe.experts.op import fused_moe as eager

    named = dict(zip(_NAMES, arguments, strict=True))
    if named["activation_dtype"] not in (None, *ASKED_FORMATS):
        named["activation_dtype"] = getattr(torch, named["activation_dtype"])
    told = named.pop("packed")
    if told:
        half = len(told) // 2
        for side, words in (("w13", told[:half]), ("w2", told[half:])):
            parts = [named.pop(side + suffix) for suffix in ("", "_scale", "_global_scale", "_bias")]
            named[side] = _weight(words, parts)
    x, *others = (named.pop(name) for name in _POSITIONAL)
    return eager(plain(x), *others, **named, out=out)


def _parts(weight: PackedWeight) -> tuple[Any, ...]:
    return tuple(weight.tensors[name] for name in PACKED_PARTS)


def _told(weight: PackedWeight) -> list[str]:
    """What a packed weight is, but for its tensors."""
    scale = weight.facts["scale"]
    of_scale = [str(scale[0])[6:], _numbers(scale[1])] if scale else ["", ""]
    of_weight = [str(weight.dtype)[6:], _numbers(weight.shape)]
    names = [weight.op, weight.layout, weight.kernel, weight.facts["side"], weight.facts["format"]]
    return [*names, *of_weight, *of_scale]


def _weight(words: list[str], parts: list[Tensor | None]) -> PackedWeight:
    """The packed weight that was told in `words`; it is not unpacked."""
    op, layout, kernel, side, form, dtype, shape, scale_dtype, scale_shape = words
    scale = (getattr(torch, scale_dtype), _shape(scale_shape)) if scale_dtype else None
    facts = {"side": side, "format": form, "scale": scale}
    tensors = {name: None if part is None else plain(part) for name, part in zip(PACKED_PARTS, parts, strict=True)}
    return PackedWeight(layout, op, kernel, tensors, _shape(shape), getattr(torch, dtype), facts)


def _numbers(shape: tuple[int, ...]) -> str:
    return " ".join(map(str, shape))


def _shape(numbers: str) -> tuple[int, ...]:
    return tuple(map(int, numbers.split()))


def _fake(x: Tensor, *arguments: Any) -> Tensor:
    return x.new_empty(x.shape)


_OPERANDS = (
    "Tensor x, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, str activation, "
    "str? activation_dtype, Tensor? w13_scale, Tensor? w2_scale, Tensor? w13_global_scale, "
    "Tensor? w2_global_scale, Tensor? w13_bias, Tensor? w2_bias, Tensor? a1_scale, Tensor? a2_scale, "
    "float alpha, float limit, bool apply_router_weight_on_input, Tensor? expert_map, Tensor? residual, "
    "str[] packed, str[]? backend"
)
define(f"fused_moe({_OPERANDS}) -> Tensor", _functional, _fake)
define(f"fused_moe_out({_OPERANDS}, Tensor(a!) out) -> ()", _mutating)
