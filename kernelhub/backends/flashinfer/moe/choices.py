"""A routing for FlashInfer's mixtures of experts: ids of local experts, each at most once per token.

If a token has an expert twice, they lose one of the two.
"""

from __future__ import annotations

import torch
from torch import Tensor


def choices_of(ids: Tensor, weights: Tensor, num_experts: int, expert_map: Tensor | None) -> tuple[Tensor, Tensor]:
    """Ids of local experts; skipped ids are outside their range."""
    if expert_map is not None:
        known = (ids >= 0) & (ids < expert_map.shape[0])
        ids = torch.where(known, expert_map[torch.where(known, ids, 0)], -1)
    return each_once(ids, weights, num_experts)


def each_once(ids: Tensor, weights: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The top-k of a token without duplicates: the first one has the weight of all, the others name no expert."""
    same = ids.unsqueeze(2) == ids.unsqueeze(1)
    summed = torch.where(same, weights.unsqueeze(1), 0.0).sum(2)
    again = same.tril(-1).any(2)
    once = torch.where(again, num_experts, ids.clamp(-1, num_experts)).int()
    return once.contiguous(), summed.contiguous()
