"""The op under torch.compile, torch.export and fake tensors; see `kernelhub.ops.attention.library`."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.dispatch.op import Backend
from kernelhub.ops.arguments import plain
from kernelhub.ops.operands import check_operand
from kernelhub.ops.operators import define, names_of


def route_experts(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    num_groups: int | None = None,
    topk_groups: int | None = None,
    correction_bias: Tensor | None = None,
    renormalize: bool = False,
    scaling_factor: float = 1.0,
    out_weights: Tensor | None = None,
    out_ids: Tensor | None = None,
    backend: Backend = None,
) -> tuple[Tensor, Tensor]:
    """`kernelhub.route_experts` through its operator."""
    if logits.is_nested:
        check_operand("route_experts", "logits", logits)
    ops = torch.ops.kernelhub
    arguments = (
        logits,
        top_k,
        scoring,
        num_groups,
        topk_groups,
        correction_bias,
        renormalize,
        scaling_factor,
        names_of(backend),
    )
    if out_weights is None and out_ids is None:
        made: tuple[Tensor, Tensor] = ops.route_experts.default(*arguments)
        return made
    shape = (logits.shape[0], top_k)
    weights = logits.new_empty(shape, dtype=torch.float32) if out_weights is None else out_weights
    ids = logits.new_empty(shape, dtype=torch.int32) if out_ids is None else out_ids
    ops.route_experts_out.default(*arguments, weights, ids)
    return weights, ids


def _functional(
    logits: Tensor,
    top_k: int,
    scoring: str,
    num_groups: int | None,
    topk_groups: int | None,
    correction_bias: Tensor | None,
    renormalize: bool,
    scaling_factor: float,
    backend: list[str] | None,
    out_weights: Tensor | None = None,
    out_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    from kernelhub.ops.moe.routing.route_experts import route_experts as eager

    return eager(
        plain(logits),
        top_k,
        scoring=scoring,
        num_groups=num_groups,
        topk_groups=topk_groups,
        correction_bias=correction_bias,
        renormalize=renormalize,
        scaling_factor=scaling_factor,
        out_weights=out_weights,
        out_ids=out_ids,
        backend=backend,
    )


def _mutating(
    logits: Tensor,
    top_k: int,
    scoring: str,
    num_groups: int | None,
    topk_groups: int | None,
    correction_bias: Tensor | None,
    renormalize: bool,
    scaling_factor: float,
    backend: list[str] | None,
    out_weights: Tensor,
    out_ids: Tensor,
) -> None:
    _functional(
        logits,
        top_k,
        scoring,
        num_groups,
        topk_groups,
        correction_bias,
        renormalize,
        scaling_factor,
        backend,
        out_weights,
        out_ids,
    )


def _fake(
    logits: Tensor,
    top_k: int,
    scoring: str,
    num_groups: int | None,
    topk_groups: int | None,
    correction_bias: Tensor | None,
    renormalize: bool,
    scaling_factor: float,
    backend: list[str] | None,
) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


_OPERANDS = (
    "Tensor logits, int top_k, str scoring, int? num_groups, int? topk_groups, Tensor? correction_bias, "
    "bool renormalize, float scaling_factor, str[]? backend"
)
define(f"route_experts({_OPERANDS}) -> (Tensor, Tensor)", _functional, _fake)
define(f"route_experts_out({_OPERANDS}, Tensor(a!) out_weights, Tensor(b!) out_ids) -> ()", _mutating)
