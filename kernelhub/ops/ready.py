"""Fresh tensors for the results of calls that come again, with less work than an allocation each.

The small results of several calls come from one allocation. Each call gets parts that no other call has had. A part
that a caller keeps holds the memory of up to 16 calls. What no call has had yet is given back, the oldest first, where
all that is ready takes more than 64 MB. Parts begin where torch's allocator might begin a tensor for all that libraries
ask: cuBLAS chooses its kernels by alignments of up to 256 bytes.

Calls of an op on one GPU take their results so, too, where the launcher's extension makes them (`fresh_of`), unless the
process has pools of memory: a caller may want results in one (`torch.cuda.use_mem_pool`), and torch has no function
that says so.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelhub.dispatch.whole_calls import WATCHED, FreshResults, Taken, maker
from kernelhub.ops.graph_memory import in_tree
from kernelhub.ops.known_form import KnownForm

_MOST_CALLS = 16  # whose results come from one allocation
_LEAST_CALLS = 4  # for fewer it is not worth it
_MOST_STREAMS = 4
_MOST_READY = 64 << 20  # bytes of this process that are ready
_MOST_BYTES = 2 << 20  # of what a call of an op has ready: calls with larger results wait for the GPU rather
_ALIGNMENT = 256  # bytes, of each part


class Form(NamedTuple):
    """A tensor of a result, and whether it begins as zeros."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    zeros: bool = False

    def made(self, device: torch.device, rows: int | None = None) -> Tensor:
        """A tensor; with so many rows, which are its first dimension."""
        make = torch.zeros if self.zeros else torch.empty
        return make((self.shape[0] if rows is None else rows, *self.shape[1:]), dtype=self.dtype, device=device)

    def parts(self, calls: int, device: torch.device) -> list[Tensor]:
        """So many tensors in one allocation."""
        rows, unused = self.shape[0], self.unused_rows
        memory = self.made(device, calls * (rows + unused))
        # Unsafe means that these are no views for autograd: each is a tensor like one of its own.
        if not unused:
            return list(torch.unsafe_split(memory, rows))
        return list(torch.unsafe_split_with_sizes(memory, [rows, unused] * calls)[::2])

    @property
    def unused_rows(self) -> int:
        """The rows between two parts of an allocation, so that each part is aligned."""
        row = torch.Size(self.shape[1:]).numel() * self.dtype.itemsize
        return -self.shape[0] % (_ALIGNMENT // math.gcd(row, _ALIGNMENT))

    @property
    def num_bytes(self) -> int:
        """What a part takes."""
        rows = self.shape[0] + self.unused_rows if self.shape[0] else 0
        return torch.Size((rows, *self.shape[1:])).numel() * self.dtype.itemsize


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
        self.name = weakref.ref(self, _KEPT.gone.append)
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
            return tuple(form.made(self.device) for form in small)
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
        return tuple(form.made(self.device) for form in self._forms)

    @functools.cached_property
    def _makers(self) -> dict[int, Callable[[], Tensor]]:
        """What makes the large results, but for those without elements."""
        made: dict[int, Callable[[], Tensor]] = {}
        for at in self._large:
            form = self._forms[at]
            if form.zeros:
                made[at] = functools.partial(form.made, self.device)
            elif form.num_bytes:
                made[at] = maker(form.shape, form.made(self.device).stride(), form.dtype, self.device)
        return made

    def _with_large(self, small: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """All results in their order, with new large ones."""
        parts = iter(small)
        quick = self._makers if self._current() == self.device.index else {}
        return tuple(
            next(parts) if at in self._small else quick[at]() if at in quick else form.made(self.device)
            for at, form in enumerate(self._forms)
        )

    def _parts(self, forms: tuple[Form, ...]) -> list[tuple[Tensor, ...]]:
        return list(zip(*(form.parts(self._calls, self.device) for form in forms), strict=True))


class _Kept:
    """What is ready in this process, the oldest first.

    Attributes:
        gone: names of what is no more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: dict[tuple[weakref.ref[Ready], int], int] = {}
        self._sum = 0
        self.gone: list[weakref.ref[Ready]] = []

    def add(self, ready: Ready, stream: int, num_bytes: int) -> None:
        """Note what was made ready on a stream, and give back the oldest of what is too much."""
        key = ready.name, stream
        with self._lock:
            if self.gone:
                gone = [self.gone.pop() for _ in range(len(self.gone))]
                names = {id(name) for name in gone}  # one that was never a key has no hash
                for one in [one for one in self._bytes if id(one[0]) in names]:
                    self._remove(one)
            self._remove(key)
            self._bytes[key] = num_bytes
            self._sum += num_bytes
            while self._sum > _MOST_READY and len(self._bytes) > 1:
                of, its_stream = oldest = next(iter(self._bytes))
                self._remove(oldest)
                before = of()
                if before is not None:
                    before.ready.pop(its_stream, None)

    def _remove(self, key: tuple[weakref.ref[Ready], int]) -> None:
        self._sum -= self._bytes.pop(key, 0)


_KEPT = _Kept()


def _shared(forms: tuple[Form, ...], most_bytes: int) -> tuple[int, tuple[int, ...]]:
    """For how many calls small results are allocated at once; and which these are."""
    by_size = sorted((at for at, form in enumerate(forms) if form.num_bytes), key=lambda at: forms[at].num_bytes)
    for count in range(len(by_size), 0, -1):
        small = by_size[:count]
        calls = min(_MOST_CALLS, most_bytes // sum(forms[at].num_bytes for at in small))
        if calls >= _LEAST_CALLS:
            return calls, tuple(sorted(small))
    return 1, ()


def fresh_of(
    known: Any, operands: Sequence[Any], made: Sequence[Tensor], pools: tuple[int, int]
) -> FreshResults | None:
    """What makes the results of calls like a known one of an op, and compares the others of its operands.

    Args:
        known: of the extension.
        operands: of the known call.
        made: its results that it made, all contiguous or with memory of their own form.
        pools: address of torch's counter of pools, and what it is without any; the address is 0 if that is not known.

    Returns:
        None if the results are not the last of the operands.
    """
    tensors = [one for one in operands if one is not None]
    given, last = tensors[: -len(made)], tensors[-len(made) :]
    if not given or {id(one) for one in last} != {id(one) for one in made}:
        return None
    form = KnownForm()
    form.learn(given, [one.shape for one in given], range(len(given)))
    others = known.with_fresh(form.holds, len(made))
    if others is None:
        return None
    small = [place for place, one in enumerate(made) if one.ndim and one.is_contiguous()]
    device = made[0].device
    at, without = pools if device.type == "cuda" else (0, 0)
    if not small or (device.type == "cuda" and (not at or ctypes.c_uint64.from_address(at).value != without)):
        return FreshResults(others, None, ())
    stock = Ready(tuple(Form(tuple(made[place].shape), made[place].dtype) for place in small), device, _MOST_BYTES)
    makers = stock.makers()
    if makers is None or None not in makers:
        return FreshResults(others, None, ())
    of_stock = {place for place, make in zip(small, makers, strict=True) if make is None}
    in_stock = tuple(place in of_stock for place in range(len(made)))
    return FreshResults(others, stock, in_stock, at, without)


def _no_device() -> None:
    return None


def _no_stream(device: int | None) -> int:
    return 0
