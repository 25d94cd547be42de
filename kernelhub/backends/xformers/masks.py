"""Ragged sequences as xformers' block-diagonal masks, made once for all layers of a step.

Such a mask has lengths on the host and offsets on the device. Causal, aligned bottom right, it needs at least as many
keys as queries in every sequence, so queries that see no key are left out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """The sequences of one step.

    Attributes:
        queries: tokens that belong to a sequence, all at the beginning of q.
        keys: the same of k.
        seeing: how many queries see a key.
        rows: their places, int64 on the device, where some do not; else None.
        mask: xformers' mask of them; None where no query sees a key.
    """

    queries: int
    keys: int
    seeing: int
    rows: Tensor | None
    mask: Any


def sequences(q_offsets: Sequence[int], k_offsets: Sequence[int], causal: bool, device: torch.device) -> Sequences:
    """The mask of sequences with these offsets."""
    from xformers.ops.fmha.attn_bias import BlockDiagonalMask

    q_lens = [end - begin for begin, end in pairwise(q_offsets)]
    k_lens = [end - begin for begin, end in pairwise(k_offsets)]
    seeing = [min(q, k) if causal else q if k else 0 for q, k in zip(q_lens, k_lens, strict=True)]
    total = sum(seeing)
    rows = mask = None
    if total:
        if seeing != q_lens:
            places = [
                place for end, count in zip(q_offsets[1:], seeing, strict=True) for place in range(end - count, end)
            ]
            rows = torch.tensor(places, device=device, dtype=torch.int64)
        mask = BlockDiagonalMask.from_seqlens(seeing, k_lens, device=device)
        # For a bound of one query FlashAttention-2 takes heads for queries, and counts on one query in each sequence.
        mask.q_seqinfo.max_seqlen = max(2, mask.q_seqinfo.max_seqlen)
    return Sequences(q_offsets[-1], k_offsets[-1], total, rows, mask)
