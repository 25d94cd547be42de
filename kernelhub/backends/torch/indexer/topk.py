"""The k highest of each row: the k-th value by torch.topk, then all above it and the first of those equal to it.

Values are compared as integers of the same order, -0 as 0 and NaN as the largest, so that equal means equal. Nothing is
read on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.indexer.adapter import TopKAdapter

_ELEMENTS = 1 << 22  # of rows at once; each needs a dozen bytes
_MINUS_INFINITY = -0x7F800001  # as an integer of the order
_NOWHERE = -0x80000000
_NAN = 0x7FFFFFFF


class TopK(TopKAdapter):
    """`topk_indices` anywhere."""

    def launch(self, logits: Tensor, row_starts: Tensor | None, row_ends: Tensor | None, out: Tensor) -> None:
        columns = logits.shape[1]
        if columns == 0:
            out.fill_(-1)
            return
        rows = max(1, _ELEMENTS // columns)
        for first in range(0, logits.shape[0], rows):
            part = slice(first, first + rows)
            starts, ends = (None if bound is None else bound[part] for bound in (row_starts, row_ends))
            _topk(logits[part], starts, ends, out[part])


def _topk(logits: Tensor, row_starts: Tensor | None, row_ends: Tensor | None, out: Tensor) -> None:
    k = out.shape[1]
    column = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    order = _ordered(logits)
    if row_starts is not None:
        order.masked_fill_(column < row_starts[:, None], _NOWHERE)
    if row_ends is not None:
        order.masked_fill_(column >= row_ends[:, None], _NOWHERE)
    wanted = min(k, logits.shape[1])
    last = order.topk(wanted, dim=1).values[:, -1:]
    above = order > last
    equal = order == last
    missing = wanted - above.sum(1, keepdim=True, dtype=torch.int32)
    taken = above | (equal & (equal.cumsum(1, dtype=torch.int32) <= missing))
    taken &= order > _MINUS_INFINITY
    place = torch.where(taken, taken.cumsum(1) - 1, k)
    index = column if row_starts is None else column - row_starts.clamp(min=0)[:, None]
    found = torch.full((len(logits), k + 1), -1, dtype=torch.int32, device=logits.device)
    found.scatter_(1, place, index.expand_as(place))  # what is not taken goes past the end
    out.copy_(found[:, :k])


def _ordered(x: Tensor) -> Tensor:
    """int32 that are ordered as the floats are."""
    bits = (x + 0.0).view(torch.int32)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return order.masked_fill_(x.isnan(), _NAN)
