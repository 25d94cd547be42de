"""Fresh tensors for the results of calls that come again, with less work than an allocation each.

The small results of several calls come from one allocation. Each call gets parts that no other call has had. A part
that a caller keeps holds the memory of up to 16 calls. What no call has had yet is given back, the oldest first, where
all that is ready takes more than 64 MB.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelhub.dispatch.whole_calls import WATCHED, Taken, maker
from kernelhub.ops.graph_memory import in_tree

_MOST_CALLS = 16  # whose results come from one allocation
_LEAST_CALLS = 4  # for fewer it is not worth it
_MOST_STREAMS = 4
_MOST_READY = 64 << 20  # bytes of this process that are ready
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
    """Fresh tensors of some forms, in their order. Threads may share it. It is a `Stock` of whole calls.

    Args:
        forms: of the results of a call, each with one dimension at least.
        device: of all of them.
        most_bytes: of what one allocation has.

    Attributes:
        ready: by stream, what later calls get there: the small results of a call each.
    """

    def __init__(self, forms: tuple[Form, ...], device: torch.device, most_bytes: int) -> None:
        self.device, self._forms = device, forms
        self._calls, self._small = _shared(forms, most_bytes)
        self._large = [at for at in range(len(forms)) if at not in self._small]
        self.ready: dict[int, list[tuple[Tensor, ...]]] = {}
        on_gpu = device.type == "cuda" and torch.cuda.is_available()  # fake tensors are on GPUs that are not here
        self._stream: Any = torch._C._cuda_getCurrentRawStream if on_gpu else _no_stream
        self._captures: Any = torch._C._cuda_isCurrentStreamCapturing if on_gpu else bool
        self._in_tree: Any = in_tree if on_gpu else bool
        self._current: Any = torch._C._cuda_getDevice if on_gpu else _no_device

    def take(self) -> tuple[Tensor, ...]:
        """Fresh tensors for a call on the current stream."""
        stream = None if self._captures() else self._stream(self.device.index)
        ready = self.ready.get(stream) if stream is not None else None
        try:
            made = ready.pop() if ready else self.refill(stream)
        except IndexError:  # another thread took the last
            made = self.refill(stream)
        if self._large:
            made = self._with_large(made)
        if WATCHED.launched is not None:
            WATCHED.taken = Taken(self, made)
        return made

    def refill(self, stream: int | None) -> tuple[Tensor, ...]:
        """The small results of a call on the current stream, with those of later calls there made ready.

        Args:
            stream: that stream; None: the results are of this call alone, as of one that is captured, whose memory is
                the graph's.
        """
        small = tuple(self._forms[at] for at in self._small)
        if self._calls == 1 or stream is None or self._in_tree(self.device.index):
            return self._allocated(small, 1)
        if torch.is_inference_mode_enabled():  # later calls may be outside of it
            with torch.inference_mode(False):
                made = self._parts(small)
        else:
            made = self._parts(small)
        found = made.pop()
        if len(self.ready) >= _MOST_STREAMS:
            self.ready.clear()
        self.ready[stream] = made
        _KEPT.add(self, stream, self._calls * sum(form.num_bytes for form in small))
        return found

    def makers(self) -> tuple[Callable[[], Tensor] | None, ...] | None:
        """For each result what makes it on the current device, None for small ones; None if one has no elements."""
        if len(self._makers) < len(self._large):
            return None
        return tuple(self._makers.get(at) for at in range(len(self._forms)))

    def alone(self) -> tuple[Tensor, ...]:
        """Tensors that share their memory with those of no other call."""
        return self._allocated(self._forms, 1)

    @functools.cached_property
    def _makers(self) -> dict[int, Callable[[], Tensor]]:
        """What makes the large results, but for those without elements."""
        made: dict[int, Callable[[], Tensor]] = {}
        for at in self._large:
            form = self._forms[at]
            if form.zeros:
                made[at] = functools.partial(form.made, 1, self.device)
            elif form.num_bytes:
                made[at] = maker(form.shape, form.made(1, self.device).stride(), form.dtype, self.device)
        return made

    def _with_large(self, small: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """All results in their order, with new large ones."""
        parts = iter(small)
        quick = self._makers if self._current() == self.device.index else {}
        return tuple(
            next(parts) if at in self._small else quick[at]() if at in quick else form.made(1, self.device)
            for at, form in enumerate(self._forms)
        )

    def _parts(self, forms: tuple[Form, ...]) -> list[tuple[Tensor, ...]]:
        memories = self._allocated(forms, self._calls)
        # Unsafe means that these are no views for autograd: each is a tensor like one of its own.
        parts = [torch.unsafe_split(memory, form.shape[0]) for memory, form in zip(memories, forms, strict=True)]
        return list(zip(*parts, strict=True))

    def _allocated(self, forms: tuple[Form, ...], calls: int) -> tuple[Tensor, ...]:
        return tuple(form.made(calls, self.device) for form in forms)


class _Kept:
    """What is ready in this process, the oldest first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: dict[tuple[weakref.ref[Ready], int], int] = {}

    def add(self, ready: Ready, stream: int, num_bytes: int) -> None:
        """Note what was made ready on a stream, and give back the oldest of what is too much."""
        key = weakref.ref(ready), stream
        with self._lock:
            self._bytes.pop(key, None)
            self._bytes[key] = num_bytes
            while sum(self._bytes.values()) > _MOST_READY and len(self._bytes) > 1:
                of, its_stream = oldest = next(iter(self._bytes))
                del self._bytes[oldest]
                before = of()
                if before is not None:
                    before.ready.pop(its_stream, None)


_KEPT = _Kept()


def _shared(forms: tuple[Form, ...], most_bytes: int) -> tuple[int, tuple[int, ...]]:
    """For how many calls small results are allocated at once; and which these are."""
    aligned = [at for at, form in enumerate(forms) if form.num_bytes and not form.num_bytes % _ALIGNMENT]
    by_size = sorted(aligned, key=lambda at: forms[at].num_bytes)
    for count in range(len(by_size), 0, -1):
        small = by_size[:count]
        calls = min(_MOST_CALLS, most_bytes // sum(forms[at].num_bytes for at in small))
        if calls >= _LEAST_CALLS:
            return calls, tuple(sorted(small))
    return 1, ()


def _no_device() -> None:
    return None


def _no_stream(device: int | None) -> int:
    return 0
