"""Routing with torch's topk, which breaks ties arbitrarily, over keys that are all distinct.

key = (what an expert is ranked by, as an integer of the same order) << 32 | (the more, the lower its id)
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.moe.routing.adapter import RoutingAdapter
from kernelhub.ops.moe.routing.problem import SIGMOID, SOFTMAX, SOFTMAX_AFTER_TOPK

_FLOAT32_MAX = torch.finfo(torch.float32).max
_LOWEST = torch.iinfo(torch.int64).min


class Routing(RoutingAdapter):
    """`route_experts` anywhere."""

    def launch(
        self, logits: Tensor, correction_bias: Tensor | None, scaling_factor: float, weights: Tensor, ids: Tensor
    ) -> None:
        problem = self.problem
        numbers = logits.float()
        numbers = torch.where(numbers.isnan(), -torch.inf, numbers).clamp_(max=_FLOAT32_MAX)
        scores = numbers
        over_chosen = problem.scoring == SOFTMAX_AFTER_TOPK or (problem.scoring == SOFTMAX and problem.renormalize)
        if problem.scoring == SOFTMAX and (correction_bias is not None or not over_chosen):
            scores = _softmax(numbers)
        elif problem.scoring == SIGMOID:
            scores = numbers.sigmoid()
        ranked = numbers
        if correction_bias is not None:
            ranked = scores + correction_bias
            ranked = torch.where(ranked.isnan(), -torch.inf, ranked)
        keys = _keys(ranked)
        if problem.num_groups > 1:
            keys = self._within_groups(keys, ranked)
        chosen = problem.num_experts - 1 - (keys.topk(problem.top_k, 1).values & 0xFFFFFFFF)
        found = (numbers if over_chosen else scores).gather(1, chosen)
        if over_chosen:
            found = _softmax(found)
        elif problem.renormalize:
            found = found / (found.sum(1, keepdim=True) + 1e-20)
        torch.mul(found, scaling_factor, out=found)
        weights.copy_(found)
        ids.copy_(chosen)

    def _within_groups(self, keys: Tensor, ranked: Tensor) -> Tensor:
        """Keys, the lowest value for groups that are not selected."""
        problem = self.problem
        by_group = ranked.unflatten(1, (problem.num_groups, -1))
        if problem.correction_bias:
            best = by_group.topk(min(2, problem.group_size), 2).values.sum(2)
            best = torch.where(best.isnan(), -torch.inf, best)
        else:
            best = by_group.amax(2)
        groups = problem.num_groups - 1 - (_keys(best).topk(problem.topk_groups, 1).values & 0xFFFFFFFF)
        outside = torch.ones_like(best, dtype=torch.bool).scatter_(1, groups, False)
        return keys.masked_fill(outside.repeat_interleave(problem.group_size, 1), _LOWEST)


def _keys(ranked: Tensor) -> Tensor:
    """int64 keys [T, N] in the order of float32 values without NaN, of equals the first the largest."""
    bits = torch.where(ranked == 0.0, 0.0, ranked).view(torch.int32)  # -0 is 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    place = torch.arange(ranked.shape[1] - 1, -1, -1, device=ranked.device)
    return (ordered.long() << 32) | place


def _softmax(numbers: Tensor) -> Tensor:
    """Over dimension 1; zeros where every number is -inf."""
    return torch.softmax(numbers, 1).nan_to_num_(nan=0.0)
