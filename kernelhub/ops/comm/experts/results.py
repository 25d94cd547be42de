"""Makes what dispatches with a capacity return: fresh tensors for each call, with less work than an allocation each."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from kernelhub.ops.comm.experts.problem import CONTIGUOUS, FORMATS, TOKENS
from kernelhub.ops.comm.experts.received import Dispatched, Header, handle_of, numbers_tensor
from kernelhub.ops.comm.ready import Form, Ready

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
        self.scaled, format = scales > 0, FORMATS[header.format]
        local, received = header.num_experts // header.world_size, header.world_size * header.max_tokens
        forms = (
            Form((*header.y_shape, hidden_size), dtype),
            *([Form((*header.y_shape, scales), torch.float32)] if scales else []),
            Form((local,), torch.int32, format == TOKENS),
            *([Form((local,), torch.int32)] if format == CONTIGUOUS else []),
            Form((received, top_k), torch.int32),
            Form((received, top_k), torch.float32),
        )
        super().__init__(forms, device, _MOST_BYTES)


class Results:
    """What calls with one capacity and number of tokens return.

    Args:
        header: of their handles.
        fresh: makes their tensors.

    Attributes:
        take: that of `fresh`.
        dispatched: what a call returns, given what `take` gave, now filled, and the ids of this rank's tokens.
    """

    def __init__(self, header: Header, fresh: Fresh) -> None:
        self.take = fresh.take
        self.dispatched = _dispatched(header, fresh.scaled, _rest(fresh.device))


def outputs_of(sent: Dispatched) -> tuple[Tensor, ...]:
    """The tensors of a result that a kernel writes."""
    made = (sent.x, sent.scales, sent.counts, sent.offsets, *sent.handle[2:4])
    return tuple(one for one in made if one is not None)


@functools.cache
def _rest(device: torch.device) -> list[Tensor]:
    """What is empty in the handles of all dispatches on a device, by which a combine recognises it."""
    with torch.inference_mode(False):
        none = torch.empty(0, 1, dtype=torch.int32, device=device)
        return handle_of(Header(*[0] * len(Header._fields)), none, none, none)[4:]


def _dispatched(header: Header, scaled: bool, rest: list[Tensor]) -> Callable[[tuple[Tensor, ...], Tensor], Dispatched]:
    """`Results.dispatched`: one function for each set of tensors, since it runs in each call."""
    numbers, (splits, sent, state) = numbers_tensor(header), rest
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
