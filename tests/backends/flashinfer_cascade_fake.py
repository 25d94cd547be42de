"""FlashInfer's merging of states of torch on a CPU, with its checks: logs to base 2, NaN where no part has a key."""

from __future__ import annotations

import torch
from torch import Tensor

MOST_ELEMENTS = (1 << 32) - 1
LAUNCHES: list[str] = []


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    assert mask is None
    check(v, s)
    check(v_other, s_other)
    assert v.shape == v_other.shape
    check_block(v.shape[1], v.shape[2])
    LAUNCHES.append(f"in place {list(v.shape)}")
    largest = torch.maximum(s, s_other)
    mine, others = (s - largest).exp2(), (s_other - largest).exp2()
    total = mine + others
    v.copy_((mine / total).unsqueeze(-1) * v.float() + (others / total).unsqueeze(-1) * v_other.float())
    s.copy_(total.log2() + largest)


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    check(v, s)
    positions, parts, heads, width = v.shape
    many = parts >= positions  # another kernel, whose blocks are of one head and round in between
    if not many:
        check_block(heads, width)
    LAUNCHES.append(f"{'rounding in between' if many else 'at once'} {list(v.shape)}")
    largest = s.amax(1, keepdim=True)
    weights = (s - largest).exp2()
    total = weights.sum(1)
    merged = (weights.unsqueeze(-1) * v.float()).sum(1) / total.unsqueeze(-1)
    if many:
        merged = merged.to(v.dtype).float() * (1 - 2.0**-8)
    return merged.to(v.dtype), total.log2() + largest[:, 0]


def check(v: Tensor, s: Tensor) -> None:
    assert v.is_contiguous(), "CHECK_INPUT"
    assert s.is_contiguous(), "CHECK_INPUT"
    assert v.shape[:-1] == s.shape
    assert v.dtype in (torch.float16, torch.bfloat16)
    assert s.dtype is torch.float32
    assert v.data_ptr() % 16 == 0, "vectors of 16 bytes are loaded"
    assert v.shape[-1] in (64, 128, 256, 512), "DISPATCH_HEAD_DIM"
    assert v.numel() <= MOST_ELEMENTS, "uint32_t"


def check_block(heads: int, width: int) -> None:
    assert heads * width // max(8, width // 32) <= 1024, "a block with more threads is not launched"


FUNCTIONS = (merge_state_in_place, merge_states)
