"""Products whose weight the ranks share."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


class ColumnParallelLinear(nn.Module):
    """Each rank has some outputs of each of the given weights."""

    def __init__(self, inputs: int, *outputs: int) -> None:
        super().__init__()
        self.parts = [count // dist.get_world_size() for count in outputs]
        self.weight = nn.Parameter(torch.empty(sum(self.parts), inputs))

    def load(self, part: int, whole: Tensor) -> None:
        mine = whole.chunk(dist.get_world_size())[dist.get_rank()]
        self.weight.data.split(self.parts)[part].copy_(mine)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class RowParallelLinear(nn.Module):
    """Each rank has some inputs; the ranks' products are added up."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs // dist.get_world_size()))

    def load(self, part: int, whole: Tensor) -> None:
        self.weight.data.copy_(whole.chunk(dist.get_world_size(), 1)[dist.get_rank()])

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.weight)
        if dist.get_world_size() > 1:
            dist.all_reduce(y)
        return y
