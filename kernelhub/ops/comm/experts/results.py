"""What dispatches with a capacity return: forms of the tensors, fresh ones for each call, earlier ones again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.comm.experts.problem import CONTIGUOUS, FORMATS, MASKED, ROWS, TOKENS
from kernelhub.ops.comm.experts.received import Dispatched, Handle, Header, handle_of, numbers_tensor
from kernelhub.ops.ready import Form, Ready

_PARTS = len(Handle._fields)
_MOST_BYTES = 8 << 20  # of what calls with one capacity have ready


class Fresh(Ready):
    """Fresh tensors for calls with one capacity, in the order of `outputs_of`. Threads may share it.

    In format tokens counts begin as zeros.

    Args:
        header: of the handle of such a call.
        hidden_size, top_k: columns of x, and choices of a token.
        scales: columns of the scales; 0 for none.
        dtype: of x.
        device: of all of them.
    """

    def __init__(
        self, header: Header, hidden_size: int, top_k: int, scales: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.scaled = scales > 0
        forms = forms_of(header, hidden_size, top_k, scales, dtype)
        super().__init__(tuple(form for form in forms.values() if form is not None), device, _MOST_BYTES)


class Results:
    """What calls with one capacity and number of tokens return.

    Args:
        header: of their handles.
        fresh: makes their tensors.

    Attributes:
        take: that of `fresh`.
        dispatched: what a call returns, given what `take` gave, now filled, and the ids of this rank's tokens.
        renewed: an earlier result whose tensors are filled anew, as the result of a call with these ids.
        shared: the parts of their handles that are the same tensors in all of them: the first, and the last three.
    """

    __slots__ = ("dispatched", "renewed", "shared", "take")

    def __init__(self, header: Header, fresh: Fresh) -> None:
        self.take = fresh.take
        numbers, rest = numbers_tensor(header), _rest(fresh.device)
        self.shared = (numbers, *rest)
        self.dispatched = _dispatched(header, fresh.scaled, numbers, rest)
        self.renewed = _renewed(header, numbers, rest)


def header_of_capacity(
    format: str, rows: str, world_size: int, num_experts: int, top_k: int, tokens: int, max_tokens: int
) -> Header:
    """That of the handle of a call with a capacity; the names are those of `FORMATS` and `ROWS`."""
    received, local = world_size * max_tokens, num_experts // world_size
    num_rows = {CONTIGUOUS: received * min(top_k, local), MASKED: received * local}.get(format, received)
    form = FORMATS.index(format), ROWS.index(rows), world_size, num_experts
    return Header(*form, tokens, max_tokens, num_rows)


def forms_of(header: Header, hidden_size: int, top_k: int, scales: int, dtype: torch.dtype) -> dict[str, Form | None]:
    """The tensors that a call with this header writes, in the order of `places_of`; None for one that it has not."""
    format = FORMATS[header.format]
    local, received = header.num_experts // header.world_size, header.world_size * header.max_tokens
    return {
        "x": Form((*header.y_shape, hidden_size), dtype),
        "scales": Form((*header.y_shape, scales), torch.float32) if scales else None,
        "counts": Form((local,), torch.int32, format == TOKENS),
        "offsets": Form((local,), torch.int32) if format == CONTIGUOUS else None,
        "topk_ids" if format == TOKENS else "handle[2]": Form((received, top_k), torch.int32),
        "topk_weights" if format == TOKENS else "handle[3]": Form((received, top_k), torch.float32),
    }


def places_of(sent: Any, format: str) -> tuple[Any, ...] | None:
    """The tensors of a result that a kernel writes, None for one that it has not; None of what is no result.

    Nothing is known of the tensors.
    """
    if type(sent) is not Dispatched:
        return None
    x, scales, ids, weights, counts, offsets, handle = sent
    if type(handle) is not list or len(handle) != _PARTS:
        return None
    if format == TOKENS:
        return x, scales, counts, offsets, ids, weights
    return None if ids is not None or weights is not None else (x, scales, counts, offsets, handle[2], handle[3])


def outputs_of(sent: Dispatched) -> tuple[Tensor, ...]:
    """The tensors of a result that a kernel writes, without those that it has not."""
    places = places_of(sent, sent.format)
    assert places is not None
    return tuple(one for one in places if one is not None)


def renew(out: Dispatched, sent: Dispatched) -> Dispatched:
    """Copy a result into an earlier one of its form, whose handle becomes that of the copy."""
    for place, part in zip(outputs_of(out), outputs_of(sent), strict=True):
        place.copy_(part)
    out.handle[:] = [*sent.handle[:2], *outputs_of(out)[-2:], *sent.handle[4:]]
    return out


@functools.cache
def _rest(device: torch.device) -> list[Tensor]:
    """What is empty in the handles of all dispatches on a device, by which a combine recognises it."""
    with torch.inference_mode(False):
        none = torch.empty(0, 1, dtype=torch.int32, device=device)
        return handle_of(Header(*[0] * len(Header._fields)), none, none, none)[4:]


def _renewed(header: Header, numbers: Tensor, rest: list[Tensor]) -> Callable[[Dispatched, Tensor], Dispatched]:
    """`Results.renewed`."""
    splits, sent, state = rest

    def tokens(out: Any, topk_ids: Tensor) -> Any:
        out[6][:] = (numbers, topk_ids, out[2], out[3], splits, sent, state)
        return out

    def by_expert(out: Any, topk_ids: Tensor) -> Any:
        handle = out[6]
        handle[:] = (numbers, topk_ids, handle[2], handle[3], splits, sent, state)
        return out

    return tokens if FORMATS[header.format] == TOKENS else by_expert


def _dispatched(
    header: Header, scaled: bool, numbers: Tensor, rest: list[Tensor]
) -> Callable[[tuple[Tensor, ...], Tensor], Dispatched]:
    """`Results.dispatched`: one function for each set of tensors, since it runs in each call."""
    splits, sent, state = rest
    format, new = FORMATS[header.format], tuple.__new__

    def tokens(outputs: tuple[Tensor, ...], topk_ids: Tensor) -> Dispatched:
        x, counts, ids, weights = outputs
        handle = [numbers, topk_ids, ids, weights, splits, sent, state]
        return new(Dispatched, (x, None, ids, weights, counts, None, handle))

    def scaled_tokens(outputs: tuple[Tensor, ...], topk_ids: Tensor) -> Dispatched:
        x, scales, counts, ids, weights = outputs
        handle = [numbers, topk_ids, ids, weights, splits, sent, state]
        return new(Dispatched, (x, scales, ids, weights, counts, None, handle))

    def by_expert(outputs: tuple[Tensor, ...], topk_ids: Tensor) -> Dispatched:
        x, counts, offsets, slots, weights = outputs
        handle = [numbers, topk_ids, slots, weights, splits, sent, state]
        return new(Dispatched, (x, None, None, None, counts, offsets, handle))

    def scaled_by_expert(outputs: tuple[Tensor, ...], topk_ids: Tensor) -> Dispatched:
        x, scales, counts, offsets, slots, weights = outputs
        handle = [numbers, topk_ids, slots, weights, splits, sent, state]
        return new(Dispatched, (x, scales, None, None, counts, offsets, handle))

    def masked(outputs: tuple[Tensor, ...], topk_ids: Tensor) -> Dispatched:
        x, counts, slots, weights = outputs
        handle = [numbers, topk_ids, slots, weights, splits, sent, state]
        return new(Dispatched, (x, None, None, None, counts, None, handle))

    def scaled_masked(outputs: tuple[Tensor, ...], topk_ids: Tensor) -> Dispatched:
        x, scales, counts, slots, weights = outputs
        handle = [numbers, topk_ids, slots, weights, splits, sent, state]
        return new(Dispatched, (x, scales, None, None, counts, None, handle))

    if format == TOKENS:
        return scaled_tokens if scaled else tokens
    if format == CONTIGUOUS:
        return scaled_by_expert if scaled else by_expert
    return scaled_masked if scaled else masked
