"""What FlashInfer's mixtures of experts ask of a routing: an expert that a token chose twice is lost once."""

from __future__ import annotations

import torch
from torch import Tensor


def each_once(ids: Tensor, weights: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Choices of a token with no expert twice: the first bears the weight of all, others are outside of the experts."""
    same = ids.unsqueeze(2) == ids.unsqueeze(1)
    summed = torch.where(same, weights.unsqueeze(1), 0.0).sum(2)
    again = same.tril(-1).any(2)
    return torch.where(again, num_experts, ids.clamp(-1, num_experts)).int(), summed
