"""Makes what dispatches with a capacity return: fresh tensors for each call, with less work than an allocation each.

The small results of several calls come from one allocation. Each call gets parts that no other call has had. A part
that a caller keeps holds the memory of up to 16 calls, at most 8 MB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelhub.ops.comm.experts.problem import CONTIGUOUS, FORMATS, TOKENS
from kernelhub.ops.comm.experts.received import Dispatched, Header, handle_of

_MOST_CALLS = 16  # whose results come from one allocation
_LEAST_CALLS = 4  # for fewer it is not worth it
_MOST_BYTES = 8 << 20  # of all of them
_MOST_STREAMS = 4
_ALIGNMENT = 16  # bytes: what kernels may require of each result


class _Form(NamedTuple):
    """A tensor of a result, and whether it begins as zeros."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    zeros: bool = False

    def made(self, calls: int, device: torch.device) -> Tensor:
        """Memory for so many of them, one behind the other in the first dimension."""
        make = torch.zeros if self.zeros else torch.empty
        return make((calls * self.shape[0], *self.shape[1:]), dtype=self.dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Fresh:
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
        self.device, self.scaled, format = device, scales > 0, FORMATS[header.format]
        local, received = header.num_experts // header.world_size, header.world_size * header.max_tokens
        self._forms = (
            _Form((*header.y_shape, hidden_size), dtype),
            *([_Form((*header.y_shape, scales), torch.float32)] if scales else []),
            _Form((local,), torch.int32, format == TOKENS),
            *([_Form((local,), torch.int32)] if format == CONTIGUOUS else []),
            _Form((received, top_k), torch.int32),
            _Form((received, top_k), torch.float32),
        )
        self._calls, self._large = _shared(self._forms)
        self._ready: dict[int, list[tuple[Tensor, ...]]] = {}  # by stream
        on_gpu = device.type == "cuda" and torch.cuda.is_available()  # fake tensors are on GPUs that are not here
        self._stream: Any = torch._C._cuda_getCurrentRawStream if on_gpu else _no_stream
        self._captures: Any = torch.cuda.is_current_stream_capturing if on_gpu else bool

    def take(self) -> tuple[Tensor, ...]:
        """Fresh tensors for a call on the current stream."""
        ready = None if self._captures() else self._ready.get(self._stream(self.device.index))
        try:
            small = ready.pop() if ready else self._made()
        except IndexError:  # another thread took the last
            small = self._made()
        return (*self._allocated(self._large, 1), *small) if self._large else small

    def _made(self) -> tuple[Tensor, ...]:
        """The small results of a call, with those of later calls on this stream made ready."""
        small = self._forms[len(self._large) :]
        # A captured call has memory of its graph, which is the graph's alone.
        if self._calls == 1 or self._captures():
            return self._allocated(small, 1)
        if torch.is_inference_mode_enabled():  # later calls may be outside of it
            with torch.inference_mode(False):
                made = self._parts(small)
        else:
            made = self._parts(small)
        found = made.pop()
        if len(self._ready) >= _MOST_STREAMS:
            self._ready.clear()
        self._ready[self._stream(self.device.index)] = made
        return found

    def _parts(self, forms: tuple[_Form, ...]) -> list[tuple[Tensor, ...]]:
        memories = self._allocated(forms, self._calls)
        # Unsafe means that these are no views for autograd: each is a tensor like one of its own.
        parts = [torch.unsafe_split(memory, form.shape[0]) for memory, form in zip(memories, forms, strict=True)]
        return list(zip(*parts, strict=True))

    def _allocated(self, forms: tuple[_Form, ...], calls: int) -> tuple[Tensor, ...]:
        return tuple(form.made(calls, self.device) for form in forms)


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
        self.dispatched = _dispatched(header, fresh.scaled, torch.empty(0, 1, dtype=torch.int32, device=fresh.device))


def outputs_of(sent: Dispatched) -> tuple[Tensor, ...]:
    """The tensors of a result that a kernel writes."""
    made = (sent.x, sent.scales, sent.counts, sent.offsets, *sent.handle[2:4])
    return tuple(one for one in made if one is not None)


def _shared(forms: tuple[_Form, ...]) -> tuple[int, tuple[_Form, ...]]:
    """For how many calls small results are allocated at once, and the forms before them that each call allocates."""
    for large in range(len(forms)):
        small = forms[large:]
        calls = min(_MOST_CALLS, _MOST_BYTES // max(1, sum(form.num_bytes for form in small)))
        if calls >= _LEAST_CALLS:
            aligned = all(form.num_bytes and not form.num_bytes % _ALIGNMENT for form in small)
            return (calls, forms[:large]) if aligned else (1, ())
    return 1, ()


def _no_stream(device: int | None) -> int:
    return 0


def _dispatched(header: Header, scaled: bool, none: Tensor) -> Callable[[tuple[Tensor, ...], Tensor], Dispatched]:
    """`Results.dispatched`: one function for each set of tensors, since it runs in each call."""
    numbers, *_, splits, sent, state = handle_of(header, none, none, none)
    format, new = FORMATS[header.format], tuple.__new__

    def tokens(outputs: tuple[Tensor, ...], topk_ids: Tensor) -> Dispatched:
        x, counts, ids, weights = outputs
        handle = [numbers, topk_ids, ids, weights, splits, sent, state]
        return new(Dispatched, (x, None, ids, weights, counts, None, handle))

    def scaled_tokens(outputs: tuple[Tensor, ...], topk_ids: Tensor) -> Dispatched:
        x, scales, *others = outputs
        return tokens((x, *others), topk_ids)._replace(scales=scales)

    def by_expert(outputs: tuple[Tensor, ...], topk_ids: Tensor) -> Dispatched:
        x, counts, *offsets, slots, weights = outputs
        handle = [numbers, topk_ids, slots, weights, splits, sent, state]
        return new(Dispatched, (x, None, None, None, counts, offsets[0] if offsets else None, handle))

    def scaled_by_expert(outputs: tuple[Tensor, ...], topk_ids: Tensor) -> Dispatched:
        x, scales, *others = outputs
        return by_expert((x, *others), topk_ids)._replace(scales=scales)

    if format == TOKENS:
        return scaled_tokens if scaled else tokens
    return scaled_by_expert if scaled else by_expert
