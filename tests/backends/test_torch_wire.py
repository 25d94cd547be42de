"""What an exchange of rows passes to a group: NCCL refuses more than gloo does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kernelhub.backends.torch.comm.experts.wire import Wire


def test_one_row_for_all_ranks_is_sent_contiguous() -> None:
    def alltoall_base(made: Tensor, rows: Tensor, from_each: list[int], to_each: list[int]) -> Any:
        if not (made.is_contiguous() and rows.is_contiguous()):
            raise ValueError("Tensors must be contiguous")  # as NCCL's group of torch 2.11
        made.copy_(rows)
        return SimpleNamespace(wait=lambda timeout=None: True)

    part = torch.arange(6, dtype=torch.uint8).view(1, 6)
    rows = part.expand(2, *part.shape).reshape(2, -1)
    assert not rows.is_contiguous()
    group: Any = SimpleNamespace(alltoall_base=alltoall_base, size=lambda: 2)
    received = Wire("moe_dispatch", group, 1.0).all_to_all(rows, 2)
    assert torch.equal(received, part.repeat(2, 1))
