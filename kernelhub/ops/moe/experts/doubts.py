"""How far a result in an opt-in format may be from the reference, since codes may differ.

A code is that of the reference unless what comes before it, or how its quotient is found, decides otherwise. So each
number on the way is followed by its deviation in kernels that are right:

* tokens: none, but of fp8_block 2^-26, since kernels multiply by reciprocals, which are rounded. Quotients of bfloat16
  numbers are simple: one in 160 is half way between two codes, and one in five of those goes the other way then;
* gate and up: a 2^-13th of what a random walk of their terms reaches (tensor cores that keep 14 bits and cut off the
  rest), and the tokens';
* what joins them: activations rise by at most 1.13 for 1;
* codes and roundings: how far they move on average, if what is rounded moves so. Little where the next code is far, but
  by a whole step where it is near; and by steps of a whole group where its scale may be another.

The deviations of what the down projection multiplies are those of the terms of the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelhub.ops.moe.experts.activations import MOVES, Activations, inner_least
from kernelhub.ops.moe.experts.problem import (
    FP8_BLOCK,
    FP8_BLOCK_GATE_UP,
    SILU,
    SWIGLU_CLAMPED,
    SWIGLU_OAI,
    SWIGLU_STEP,
)
from kernelhub.ops.moe.experts.reference import activations_of, joined, layer_of, local_ids
from kernelhub.ops.moe.experts.weights import dequantized

NEAR, SUMS = 2.0**-26, 2.0**-13
_STEEPEST = 1.13
_MOST = 4.0  # deviations
_LAYER = tuple(side + part for side in ("w13", "w2") for part in ("", "_scale", "_global_scale", "_bias"))


class Doubtful(NamedTuple):
    """Numbers of the reference in kernels that are right; float64 of one shape.

    Attributes:
        value: the numbers.
        std: their deviations.
        farthest: how far one may be at most; None for four deviations. A deviation says little of a number that is
            rounded and seldom goes the other way, but then moves the scale of its whole group.
    """

    value: Tensor
    std: Tensor
    farthest: Tensor | None = None

    @property
    def reach(self) -> Tensor:
        """How far a number may be at most."""
        return _MOST * self.std if self.farthest is None else self.farthest

    def rounded(self, dtype: torch.dtype) -> Doubtful:
        """The values rounded to a dtype."""
        value = self.value.to(dtype).double()
        moved, farthest = torch.zeros_like(value), torch.zeros_like(value)
        for far, chance in MOVES:
            moved += chance * ((self.value + far * self.std).to(dtype).double() - value).square()
        for way in (-1.0, 1.0):
            farthest = torch.maximum(farthest, ((self.value + way * self.reach).to(dtype).double() - value).abs())
        return Doubtful(value, moved.sqrt(), farthest)

    def coded(self, activations: Activations, scale: Tensor | None, least: float) -> Doubtful:
        """The values rounded to a format."""
        value = activations.rounded(self.value, scale, torch.float64, least)
        return Doubtful(value, activations.variance(self.value, self.std, self.reach, scale, least).sqrt())

    def times(self, weight: Tensor) -> Doubtful:
        """Rows [R, K] by weights [N, K]."""
        squared = weight.square().t()
        doubts = self.value.square() @ squared * SUMS**2 + self.std.square() @ squared
        return Doubtful(self.value @ weight.t(), doubts.sqrt())


class DoubtfulPart(NamedTuple):
    """The contribution of one expert.

    Attributes:
        tokens: [R], which tokens go to it.
        result: [R, H], what is added to them.
        squares: [R, H], of the terms of the result, summed.
        doubts: [R, H], of their deviations, summed.
        of_rows: `fourth_powers` of the part.
    """

    tokens: Tensor
    result: Tensor
    squares: Tensor
    doubts: Tensor
    of_rows: Tensor


def fourth_powers(inner: Tensor, w2: Tensor, weights: Tensor) -> Tensor:
    """Of what each element of `inner` [R, I] adds to rows by w2 [H, I] and weights [R, 1]: sizes^4, summed; float64."""
    return (inner.square() * w2.square().sum(0) * weights.square()).double().square().sum()


def doubtful_parts(arguments: dict[str, Any], rounds_halves: bool) -> Iterator[DoubtfulPart]:
    """The parts of a call, expert by expert, in float64.

    Args:
        arguments: of the op; `activation_dtype` is a format.
        rounds_halves: whether gate and up, and what joins them, are the dtype of the tokens before they are quantised.
    """
    x, on_input = arguments["x"], arguments.get("apply_router_weight_on_input", False)
    layer = layer_of(**{name: arguments.get(name) for name in _LAYER})  # type: ignore[arg-type]
    activations = activations_of(layer.weights, arguments["activation_dtype"], x.dtype)
    local = local_ids(arguments["topk_ids"], arguments.get("expert_map"), layer.w13.weight.shape[0])
    near = NEAR if activations.form == FP8_BLOCK else 0.0
    for expert in range(layer.w13.weight.shape[0]):
        tokens, places = torch.nonzero(local == expert, as_tuple=True)
        if not len(tokens):
            continue
        router = arguments["topk_weights"][tokens, places].double().unsqueeze(1)
        rows = x[tokens].double()
        given = Doubtful(rows, near * rows.abs()).coded(activations, arguments.get("a1_scale"), inner_least(""))
        both = given.times(dequantized(layer.weights, layer.w13, expert, torch.float64))
        if on_input:
            both, router = Doubtful(both.value * router, both.std * router.abs()), torch.ones_like(router)
        bias = None if layer.w13.bias is None else layer.w13.bias[expert].double()
        inner = _inner(both, bias, activations, arguments, rounds_halves)
        down = dequantized(layer.weights, layer.w2, expert, torch.float64)
        result = inner.value @ down.t()
        if layer.w2.bias is not None:
            result = result + layer.w2.bias[expert].double()
        factor, weighed = router.square(), down.square().t()
        squares, doubts = inner.value.square() @ weighed * factor, inner.std.square() @ weighed * factor
        yield DoubtfulPart(tokens, result * router, squares, doubts, fourth_powers(inner.value, down, router))


def _inner(
    both: Doubtful, bias: Tensor | None, activations: Activations, arguments: dict[str, Any], rounds_halves: bool
) -> Doubtful:
    """What the down projection multiplies, of gate and up without their bias."""
    dtype, least = arguments["x"].dtype, inner_least(activations.form)
    if rounds_halves:
        both = both.rounded(dtype)
    if bias is not None:
        both = both._replace(value=both.value + bias)
    if activations.form == FP8_BLOCK_GATE_UP:
        both = both.coded(activations, None, least)
    inner = _joined(both, arguments)
    if rounds_halves or activations.form == FP8_BLOCK:
        inner = inner.rounded(dtype)
    return inner.coded(activations, arguments.get("a2_scale"), least)


def _joined(both: Doubtful, arguments: dict[str, Any]) -> Doubtful:
    """The activation of gate and up [R, 2I]."""
    activation, alpha, limit = (
        arguments.get(name, usual) for name, usual in (("activation", SILU), ("alpha", 1.702), ("limit", 7.0))
    )
    value = joined(both.value, activation, alpha, limit)
    half = value.shape[1]
    up, one = both.value[:, half:], torch.ones_like(value)
    if activation == SWIGLU_OAI:
        up, one = up.clamp(-limit, limit) + 1.0, torch.zeros_like(value)
    elif activation in (SWIGLU_CLAMPED, SWIGLU_STEP):
        up, one = up.clamp(-limit, limit), one.clamp(max=limit)
    gate = joined(torch.cat([both.value[:, :half], one], 1), activation, alpha, limit)
    if activation != SWIGLU_OAI:
        gate = torch.where(one > 0.0, gate / one, 0.0)

    def spread(of_both: Tensor) -> Tensor:
        of_gate, of_up = (part.square() for part in of_both.chunk(2, 1))
        return (_STEEPEST**2 * of_gate * (up.square() + of_up) + gate.square() * of_up).sqrt()

    return Doubtful(value, spread(both.std), spread(both.reach))
