"""How far a routing may be from the reference, and why.

Without a bias experts are ranked by their logits, which are exact, so ids are those of the reference.

A score is an exponential of at most 2^7 (beyond, it underflows) in float32: the argument times log2(e) is off by
2^7 2^-24 1.5, the exponential by 2^-22 more, so a score, or a ratio of scores and their sum, by less than 2^-15 of
itself. Values below 2^-126 may be flushed to zero.

With a bias experts are ranked by score plus bias, off by 2^-15 (no score is above one, unless it is a logit and exact)
and a rounding of the sum. Where two values that decide are nearer than twice that, either order is right.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.moe.routing.reference import group_scores, ranking

RELATIVE = 2.0**-15
SMALLEST = 2.0**-126


def weights_agree(weights: Tensor, want: Tensor, scaling_factor: float = 1.0) -> Tensor:
    """Whether each weight [T, top_k] is within its bound."""
    allowed = RELATIVE * want.double().abs() + 2 * SMALLEST * max(1.0, abs(scaling_factor))
    return (weights.double() - want.double()).abs() <= allowed


def decided(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    num_groups: int | None = None,
    topk_groups: int | None = None,
    correction_bias: Tensor | None = None,
    **others: object,
) -> Tensor:
    """Whether rounding cannot change the ids of each token [T]."""
    if correction_bias is None:
        return torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device)
    ranked = ranking(logits, scoring, correction_bias, torch.float64)[2]
    margin = 2 * (RELATIVE + 2.0**-22 * ranked.nan_to_num(neginf=0.0).abs().amax(1))
    sure = torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device)
    groups = num_groups or 1
    if groups > 1:
        by_group = group_scores(ranked, groups, True).sort(1, descending=True).values
        kept = topk_groups or groups
        if kept < groups:
            sure &= by_group[:, kept - 1] - by_group[:, kept] > 2 * margin
        inside = group_scores(ranked, groups, True) >= by_group[:, kept - 1 : kept]
        ranked = torch.where(inside.repeat_interleave(ranked.shape[1] // groups, 1), ranked, -torch.inf)
    best = ranked.sort(1, descending=True).values[:, : top_k + 1]
    gaps = best[:, :-1] - best[:, 1:]
    return sure & (gaps > margin.unsqueeze(1)).all(1)
