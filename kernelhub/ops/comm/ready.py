"""Fresh tensors for the results of calls that come again, with less work than an allocation each.

The small results of several calls come from one allocation. Each call gets parts that no other call has had. A part
that a caller keeps holds the memory of up to 16 calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelhub.dispatch.whole_calls import maker
from kernelhub.ops.graph_memory import in_tree

_MOST_CALLS = 16  # whose results come from one allocation
_LEAST_CALLS = 4  # for fewer it is not worth it
_MOST_STREAMS = 4
_ALIGNMENT = 16  # bytes: what kernels may require of each result


class Form(NamedTuple):
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


class Ready:
    """Fresh tensors of some forms, in their order. Threads may share it.

    Args:
        forms: of the results of a call, each with one dimension at least.
        device: of all of them.
        most_bytes: of what one allocation has.
    """

    def __init__(self, forms: tuple[Form, ...], device: torch.device, most_bytes: int) -> None:
        self.device, self._forms, self._most_bytes = device, forms, most_bytes
        self._calls, self._large = self._shared()
        self._ready: dict[int, list[tuple[Tensor, ...]]] = {}  # by stream
        on_gpu = device.type == "cuda" and torch.cuda.is_available()  # fake tensors are on GPUs that are not here
        self._stream: Any = torch._C._cuda_getCurrentRawStream if on_gpu else _no_stream
        self._captures: Any = torch._C._cuda_isCurrentStreamCapturing if on_gpu else bool
        self._in_tree: Any = in_tree if on_gpu else bool
        self._current: Any = torch._C._cuda_getDevice if on_gpu else _no_device
        self._makers: tuple[Callable[[], Tensor], ...] | None = None  # of large results, on the current device

    def take(self) -> tuple[Tensor, ...]:
        """Fresh tensors for a call on the current stream."""
        ready = None if self._captures() else self._ready.get(self._stream(self.device.index))
        try:
            small = ready.pop() if ready else self._made()
        except IndexError:  # another thread took the last
            small = self._made()
        return (*self._made_large(), *small) if self._large else small

    def alone(self) -> tuple[Tensor, ...]:
        """Tensors that share their memory with those of no other call."""
        return self._allocated(self._forms, 1)

    def _made_large(self) -> tuple[Tensor, ...]:
        if self._current() != self.device.index:
            return self._allocated(self._large, 1)
        if self._makers is None:
            forms = [(form, form.made(1, self.device)) for form in self._large]
            makers = [maker(form.shape, one.stride(), form.dtype, self.device) for form, one in forms if not form.zeros]
            if len(makers) < len(forms):
                return tuple(one for _, one in forms)
            self._makers = tuple(makers)
        return tuple([make() for make in self._makers])

    def _made(self) -> tuple[Tensor, ...]:
        """The small results of a call, with those of later calls on this stream made ready."""
        small = self._forms[len(self._large) :]
        # A captured call has memory of its graph, which is the graph's alone, as has the call before it in a tree.
        if self._calls == 1 or self._captures() or self._in_tree(self.device.index):
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

    def _parts(self, forms: tuple[Form, ...]) -> list[tuple[Tensor, ...]]:
        memories = self._allocated(forms, self._calls)
        # Unsafe means that these are no views for autograd: each is a tensor like one of its own.
        parts = [torch.unsafe_split(memory, form.shape[0]) for memory, form in zip(memories, forms, strict=True)]
        return list(zip(*parts, strict=True))

    def _allocated(self, forms: tuple[Form, ...], calls: int) -> tuple[Tensor, ...]:
        return tuple(form.made(calls, self.device) for form in forms)

    def _shared(self) -> tuple[int, tuple[Form, ...]]:
        """For how many calls small results are allocated at once; and the forms before them, of each call's own."""
        for large in range(len(self._forms)):
            small = self._forms[large:]
            calls = min(_MOST_CALLS, self._most_bytes // max(1, sum(form.num_bytes for form in small)))
            if calls >= _LEAST_CALLS:
                aligned = all(form.num_bytes and not form.num_bytes % _ALIGNMENT for form in small)
                return (calls, self._forms[:large]) if aligned else (1, ())
        return 1, ()


def _no_device() -> None:
    return None


def _no_stream(device: int | None) -> int:
    return 0
