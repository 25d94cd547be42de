"""Stand-in: the masks that kernelhub asks for, with what they check."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass
class _SeqLenInfo:
    seqstart: torch.Tensor
    max_seqlen: int
    lengths: list[int]


def _info(lengths, device):
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return _SeqLenInfo(offsets, max(lengths), lengths)


class LowerTriangularFromBottomRightMask:
    pass


@dataclass
class BlockDiagonalMask:
    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen=None, *, device=None):
        assert device is not None
        assert all(type(length) is int for length in (*q_seqlen, *kv_seqlen))
        assert len(q_seqlen) == len(kv_seqlen)
        q = _info(q_seqlen, device)
        return cls(q, q if q_seqlen == kv_seqlen else _info(kv_seqlen, device))

    def make_causal_from_bottomright(self):
        for queries, keys in zip(self.q_seqinfo.lengths, self.k_seqinfo.lengths, strict=True):
            if queries > keys:
                raise ValueError("the queries cannot exceed the keys")
        return BlockDiagonalCausalFromBottomRightMask(self.q_seqinfo, self.k_seqinfo)


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    pass
