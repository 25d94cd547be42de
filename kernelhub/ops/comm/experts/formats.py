"""From received tokens to rows per expert, and from results per expert back to tokens, in torch.

Nothing here waits for the device, except to count the rows of exact formats. An expert gets a token once: if a token
chose it twice, the weights are added.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernelhub.ops.comm.experts.problem import CONTIGUOUS, TOKENS


class Arranged(NamedTuple):
    """Received tokens in a format; attributes as of `received.Dispatched` and `received.Handle`."""

    x: Tensor
    scales: Tensor | None
    counts: Tensor
    offsets: Tensor | None
    slots: Tensor
    weights: Tensor


def arranged(
    x: Tensor, scales: Tensor | None, ids: Tensor, weights: Tensor, num_experts: int, format: str, exact: bool
) -> Arranged:
    """Rows of a format.

    Args:
        x: received tokens ``[R, H]``; any dtype, contiguous.
        scales: ``[R, S]``, or None.
        ids: int32 ``[R, top_k]``, local; -1 for no expert of this rank.
        weights: float32 ``[R, top_k]``; anything where the id is -1.
        num_experts: of this rank.
        format: one of `FORMATS`.
        exact: as many rows as there are, which waits for the device; otherwise as many as there can be.
    """
    tokens, top_k = ids.shape
    if format == TOKENS:
        here = ids >= 0
        return Arranged(x, scales, _counts(ids, num_experts), None, ids, torch.where(here, weights, 0.0))
    ids, weights = _once(ids, weights)
    counts = _counts(ids, num_experts)
    ends = counts.cumsum(0, dtype=torch.int32)
    pairs = torch.where(ids < 0, num_experts, ids).flatten()
    order = pairs.argsort(stable=True)  # by expert, then by token; those without an expert last
    token = order // max(top_k, 1)
    if format == CONTIGUOUS:
        most = int(ends[-1]) if exact else tokens * min(top_k, num_experts)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        slots = torch.where(ids < 0, -1, place.view_as(ids)).int()
        taken = token[:most]
        of_scales = None if scales is None else _taken(scales, taken)
        return Arranged(_taken(x, taken), of_scales, counts, ends, slots, weights)
    most = (int(counts.max()) if exact else tokens) if tokens else 0
    expert = pairs[order].long()
    begins = torch.cat([ends - counts, ends.new_zeros(1)])  # of those without an expert, anything
    within = torch.arange(order.numel(), device=order.device) - begins[expert]
    slot = torch.where(expert < num_experts, expert * most + within, num_experts * most)  # the last is not read
    slots = torch.empty_like(slot).scatter_(0, order, slot).view_as(ids)
    slots = torch.where(ids < 0, -1, slots).int()
    form = (num_experts, most)
    of_scales = None if scales is None else _put(scales, token, slot, form)
    return Arranged(_put(x, token, slot, form), of_scales, counts, None, slots, weights)


def gathered(y: Tensor, slots: Tensor, weights: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weighted sum of each token's results, ``[R, H]`` in `dtype`, in the order of its choices.

    Args:
        y: ``[..., H]``, rows of experts. Rows that no slot names are not part of the result.
        slots: int32 ``[R, top_k]``.
        weights: float32 ``[R, top_k]``.
    """
    rows = y.reshape(-1, y.shape[-1])
    total = rows.new_zeros((slots.shape[0], rows.shape[1]), dtype=dtype)
    if not rows.shape[0] or not slots.numel():
        return total
    for choice in range(slots.shape[1]):
        slot = slots[:, choice]
        term = rows.index_select(0, slot.clamp(min=0)).to(dtype) * weights[:, choice, None].to(dtype)
        total += torch.where(slot[:, None] >= 0, term, 0.0)
    return total


def _once(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Ids without repetitions, and the weights of equal ones added at the first of them."""
    same = ids.unsqueeze(2) == ids.unsqueeze(1)
    summed = torch.where(same, weights.unsqueeze(1), 0.0).sum(2)
    choice = torch.arange(ids.shape[1], device=ids.device)
    earlier = (same & (choice < choice.unsqueeze(1))).any(2)
    ids = torch.where(earlier, -1, ids)
    return ids, torch.where(ids < 0, 0.0, summed)


def _counts(ids: Tensor, num_experts: int) -> Tensor:
    """int32 [num_experts]; not by bincount, which waits for the device."""
    places = torch.where(ids < 0, num_experts, ids).flatten().long()
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
    return counts.scatter_add_(0, places, torch.ones_like(places, dtype=torch.int32))[:num_experts]


def _taken(rows: Tensor, index: Tensor) -> Tensor:
    """Rows by index, as bytes where torch has no index_select of the dtype."""
    raw = rows.view(torch.uint8) if rows.itemsize == 1 else rows
    return raw.index_select(0, index).view(rows.dtype)


def _put(rows: Tensor, token: Tensor, slot: Tensor, form: tuple[int, int]) -> Tensor:
    """Rows by token at their slots; the others are as memory came."""
    raw = rows.view(torch.uint8) if rows.itemsize == 1 else rows
    made = raw.new_empty((form[0] * form[1] + 1, raw.shape[1]))
    if token.numel():
        made.index_copy_(0, slot, raw.index_select(0, token))
    return made[:-1].view(rows.dtype).view(*form, raw.shape[1])
