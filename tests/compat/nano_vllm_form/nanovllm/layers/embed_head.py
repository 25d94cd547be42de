"""Embedding and logits, whose vocabulary the ranks share."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanovllm.utils.context import get_context


class VocabParallelEmbedding(nn.Module):
    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab // dist.get_world_size(), hidden))

    def load(self, part: int, whole: Tensor) -> None:
        self.weight.data.copy_(whole.chunk(dist.get_world_size())[dist.get_rank()])

    def forward(self, x: Tensor) -> Tensor:
        own = x - dist.get_rank() * len(self.weight)
        held = (own >= 0) & (own < len(self.weight))
        y = nn.functional.embedding(own.where(held, 0), self.weight) * held[:, None]
        if dist.get_world_size() > 1:
            dist.all_reduce(y)
        return y


class ParallelLMHead(VocabParallelEmbedding):
    """Logits of the last token of each sequence, on rank 0."""

    def forward(self, x: Tensor) -> Tensor | None:
        step = get_context()
        if step.is_prefill:
            x = x[step.cu_seqlens_q[1:].long() - 1]
        mine = nn.functional.linear(x, self.weight)
        if dist.get_world_size() == 1:
            return mine
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
        dist.gather(mine, parts, 0)
        return None if parts is None else torch.cat(parts, -1)
