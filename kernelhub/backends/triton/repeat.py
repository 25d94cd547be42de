"""Repeats the launches of a call with other tensors of the same form, in one entry into the launcher.

Most of what a call of an adapter costs the host is the same at each decode step: tiles, grids, strides, variants,
sizes of temporaries. So the second call with a key is watched: each launch and its arguments. Calls after it compare
the form of their tensors with torch's guards, allocate all temporary memory at once, and make the same launches.

A call is repeated only if its launches are all it does. While it is watched, an operator of torch that is neither an
allocation nor a view, a launch that is Triton's to make, and a pointer that could be of two operands rule that out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernelhub.backends.triton.launch import WATCHED, Launch, sequence
from kernelhub.ops.known_form import KnownForm
from kernelhub.runtime import launch

_MOST_KEYS = 256  # of calls that are repeated, per adapter
_MOST_SEEN = 4096  # keys that were met once
_MOST_BYTES = (
    64 << 20
)  # of temporary memory: the temporaries of a larger call are freed one by one, as they are used up
_ALIGNMENT = 256  # of temporaries, as torch's allocator aligns them
_ALLOCATIONS = frozenset(f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty"))


class _Known(NamedTuple):
    """The calls of one key.

    Attributes:
        launch: makes the launches of a call whose tensors have one of the forms; False, with nothing launched, for
            others and for forms that are not repeated.
        forms: each form's check, and its `Sequence`, or None if it is not repeated.
    """

    launch: Callable[..., bool]
    forms: tuple[tuple[Callable[..., bool], Any], ...]


class Repeated:
    """The calls of an adapter that are repeated. Threads may share it."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known] = {}
        self._seen: set[Hashable] = set()

    def clear(self) -> None:
        """Repeat no call from before: other tiles are chosen now."""
        self._known.clear()
        self._seen.clear()

    def run(self, key: Hashable, tensors: Sequence[Tensor], anew: Callable[..., None], *arguments: Any) -> None:
        """Make a call as one before it, else by ``anew(*arguments)``.

        Args:
            key: every value that the launches depend on, but the tensors.
            tensors: every tensor that the launches read or write and that is not made by the call, on one device; for
                equal keys as many, none of them nested.
            anew: makes the call.
            arguments: of `anew`.
        """
        known = self._known.get(key)
        if known is None or not known.launch(*tensors):
            with self._watched(key, tensors):
                anew(*arguments)

    def launch_of(self, key: Hashable) -> Callable[..., bool] | None:
        """What makes the launches of a call with this key, given its tensors: True if it did. None if there is none."""
        known = self._known.get(key)
        return None if known is None else known.launch

    def _watched(self, key: Hashable, tensors: Sequence[Tensor]) -> contextlib.AbstractContextManager[Any]:
        """A block that makes the call, and is watched if such calls may come again."""
        native = launch.native()
        if native is None or not launch.in_use():
            return contextlib.nullcontext()
        if key not in self._seen:
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen.add(key)
            return contextlib.nullcontext()
        known = self._known.get(key)
        forms = () if known is None else known.forms
        if any(holds(*tensors) for holds, _ in forms):  # the profiler's hooks are set, or it is not repeated
            return contextlib.nullcontext()
        return self._watching(key, tensors, forms, native.module)

    @contextlib.contextmanager
    def _watching(
        self, key: Hashable, tensors: Sequence[Tensor], forms: tuple[tuple[Callable[..., bool], Any], ...], module: Any
    ) -> Iterator[None]:
        before, WATCHED.launches = WATCHED.launches, []
        foreign = _Foreign()
        try:
            with foreign:
                yield
            launches = WATCHED.launches
        finally:
            WATCHED.launches = before
        made = None if foreign.met or not launches else repetition(launches, tensors)
        form = KnownForm()
        form.learn(tensors, [tensor.shape for tensor in tensors], range(len(tensors)))
        forms = ((form.holds, made), *forms[: module.MAX_FORMS - 1])
        if len(self._known) >= _MOST_KEYS:
            self._known.clear()
        self._known[key] = _Known(module.Forms(forms).launch, forms)


class _Foreign(TorchDispatchMode):
    """Notes whether torch does anything but allocate memory and view it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.met = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        views = any(made.alias_info is not None and not made.alias_info.is_write for made in schema.returns)
        if not views and schema.name not in _ALLOCATIONS:
            self.met = True
        return func(*args, **(kwargs or {}))


class Last(NamedTuple):
    """What a step keeps of the last call that was made with it, so that the next layer's call is made alike.

    Attributes:
        adapter, values: of the call.
        launch: makes the launches of a call with the same metadata and values, given its tensors.
    """

    adapter: Any
    values: Any
    launch: Callable[..., bool]


def repetition(launches: Sequence[Launch], tensors: Sequence[Tensor]) -> Any:
    """The `Sequence` that repeats launches, given the tensors.

    None if Triton has to make one of them, or a pointer could be of more than one tensor.
    """
    temporaries = _Temporaries(tensors)
    places = []
    for one in launches:
        of = [temporaries.place(argument) if isinstance(argument, Tensor) else None for argument in one.arguments]
        if any(place is _UNCLEAR for place in of):
            return None
        places.append(of)
    if temporaries.room > _MOST_BYTES:
        return None
    steps = [one.launcher.step(one.programs, one.variant, *one.arguments) for one in launches]
    aligned = [at for at, tensor in enumerate(tensors) if not tensor.data_ptr() & 15]
    return sequence(steps, places, len(tensors), aligned, temporaries.room)


_UNCLEAR = (-1, -1)


class _Temporaries:
    """Where pointers of a call point: into its tensors, or in memory that it allocated itself."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._spans = [(tensor.data_ptr(), tensor.data_ptr() + extent_bytes(tensor)) for tensor in tensors]
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self._offsets: dict[int, int] = {}
        self.room = 0

    def place(self, argument: Tensor) -> tuple[int, int] | None:
        """The operand's number and the bytes beyond its address; None for a tensor without memory."""
        address = argument.data_ptr()
        if address == 0:
            return None
        same = next((at for at, tensor in enumerate(self._tensors) if tensor is argument), None)
        if same is not None:
            return (same, 0)
        span = (address, address + extent_bytes(argument))
        found = [at for at, own in enumerate(self._spans) if own == span]  # all of an operand, in another dtype
        if len(found) != 1:
            found = [at for at, (begin, end) in enumerate(self._spans) if begin <= address < end]
        storage = argument.untyped_storage()
        base = storage.data_ptr()
        if found or base in self._storages:
            return (found[0], address - self._spans[found[0]][0]) if len(found) == 1 else _UNCLEAR
        if base not in self._offsets:
            self._offsets[base] = self.room
            self.room += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        return (len(self._tensors), self._offsets[base] + address - base)


def extent_bytes(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if not tensor.numel():
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()
