"""`route_experts` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def route_experts_reference(
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
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """The op, computed in `dtype`, weights returned in it; arguments as of the op, destinations ignored."""
    numbers, scores, ranked = ranking(logits, scoring, correction_bias, dtype)
    groups = num_groups or 1
    if groups > 1:
        best = _first(group_scores(ranked, groups, correction_bias is not None), topk_groups or groups)
        outside = torch.ones(ranked.shape[0], groups, dtype=torch.bool, device=ranked.device).scatter_(1, best, False)
        # Below what -inf ranks: a chosen group's worst expert is still before others'.
        order = torch.sort(ranked, dim=1, descending=True, stable=True).indices
        outside = outside.repeat_interleave(ranked.shape[1] // groups, 1).gather(1, order)
        ids = order.gather(1, torch.sort(outside.int(), dim=1, stable=True).indices[:, :top_k])
    else:
        ids = _first(ranked, top_k)
    if scoring == "softmax_after_topk" or (scoring == "softmax" and renormalize):
        # Of the chosen alone, as their sum may be next to nothing among all.
        weights = _softmax(numbers.gather(1, ids))
    else:
        weights = scores.gather(1, ids)
        if renormalize:
            weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return weights * scaling_factor, ids.int()


def ranking(
    logits: Tensor, scoring: str, correction_bias: Tensor | None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits without NaN and +inf, their scores, and what experts are ranked by, all [T, E] in `dtype`."""
    largest = torch.finfo(torch.float32).max
    numbers = logits.to(dtype)
    numbers = torch.where(numbers.isnan(), -torch.inf, numbers).clamp(max=largest)
    scores = numbers
    if scoring == "softmax":
        scores = _softmax(numbers)
    elif scoring == "sigmoid":
        scores = numbers.sigmoid()
    if correction_bias is None:
        return numbers, scores, numbers
    biased = scores + correction_bias.to(dtype)
    return numbers, scores, torch.where(biased.isnan(), -torch.inf, biased)


def group_scores(ranked: Tensor, num_groups: int, best_two: bool) -> Tensor:
    """[T, num_groups]: the best of each group, or the sum of its best two."""
    best = ranked.unflatten(1, (num_groups, -1)).sort(2, descending=True).values[..., : 2 if best_two else 1].sum(2)
    return torch.where(best.isnan(), -torch.inf, best)


def _first(ranked: Tensor, count: int) -> Tensor:
    """Indices of the largest, ties to the lowest index."""
    return torch.sort(ranked, dim=1, descending=True, stable=True).indices[:, :count]


def _softmax(numbers: Tensor) -> Tensor:
    """Over dimension 1; zeros where every number is -inf."""
    top = numbers.amax(1, keepdim=True)
    parts = (numbers - torch.where(top == -torch.inf, 0.0, top)).exp()
    total = parts.sum(1, keepdim=True)
    return parts / torch.where(total == 0.0, 1.0, total)
