"""Repeats the launches of a call with other tensors of the same form, in one entry into the launcher.

Most of what a call of an adapter costs the host is the same at each decode step: tiles, grids, strides, variants,
sizes of temporaries. So the second call with a key is watched: each launch and its arguments. Calls after it compare
the form of their tensors with torch's guards, allocate all temporary memory at once, and make the same launches.

A call may be made of others that would be repeated alone. Then it has their launches, and the memory that they share.

A call is repeated only if its launches are all it does. While it is watched, an operator of torch that is neither an
allocation nor a view, a launch that the launcher cannot make, and a pointer that could be of two operands rule that
out.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernelhub.backends.shared.launches import WATCHED, Launch, Shared, sequence
from kernelhub.ops.graph_memory import captures
from kernelhub.ops.known_calls import are_apart, places_of
from kernelhub.ops.known_form import KnownForm
from kernelhub.runtime import launch
from kernelhub.runtime.counters import is_counters

_MOST_KEYS = 256  # of calls that are repeated, per adapter
_MOST_SEEN = 4096  # keys that were met once
_MOST_BYTES = (
    64 << 20
)  # of temporary memory: the temporaries of a larger call are freed one by one, as they are used up
_ALIGNMENT = 256  # of temporaries, as torch's allocator aligns them
_ALLOCATIONS = frozenset(f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty"))


class _Form(NamedTuple):
    """Calls whose tensors have one form.

    Attributes:
        holds: whether tensors that are not nested have it.
        sequence: the `Sequence` of the launches, or None if they are not repeated.
        known: the form's `Known`.
        apart: the same of tensors that nothing has checked, with a destination that shares no memory with the others.
            None if it may have done so when the form was learned, or if it is not known which the destination is.
    """

    holds: Callable[..., bool]
    sequence: Any
    known: Any
    apart: Any


class _Known(NamedTuple):
    """The calls of one key.

    Attributes:
        launch: makes the launches of a call whose tensors have one of the forms; False, with nothing launched, for
            others and for forms that are not repeated.
        again: the same for tensors that nothing has checked, if the destination shares no memory with the others; None
            if no form is known to be so.
        forms: those that were learned.
    """

    launch: Callable[..., bool]
    again: Callable[..., bool] | None
    forms: tuple[_Form, ...]


class Repeated:
    """The calls of an adapter that are repeated. Threads may share it."""

    def __init__(self, written: int | None = None, shared: Shared | None = None) -> None:
        """Arguments:

        written: for `Last.again`, the index of the destination among a call's tensors; below 0 from the end.
        shared: memory that launches read and write beside the tensors of a call.
        """
        self._written, self._shared = written, shared
        self._known: dict[Hashable, _Known] = {}
        self._seen: set[Hashable] = set()
        self._wholes: weakref.WeakSet[Repeated] = weakref.WeakSet()  # of calls that these are a part of

    def clear(self) -> None:
        """Repeat no call from before: other tiles are chosen now."""
        for whole in list(self._wholes):
            whole.clear()
        for known in self._known.values():
            for form in known.forms:
                if form.sequence is not None:
                    form.sequence.close()
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
        if WATCHED.parts is not None:  # a watched call is made of this one
            WATCHED.parts.append(self)
            anew(*arguments)
            return
        known = self._known.get(key)
        if known is None or not known.launch(*tensors):
            with self._watched(key, tensors):
                anew(*arguments)

    def last_of(self, key: Hashable, adapter: Any, values: Any) -> Last | None:
        """What a step keeps of a call that was made; None if such calls are not repeated."""
        known = self._known.get(key)
        return None if known is None else Last(adapter, values, known.launch, known.again)

    def sequence_of(self, key: Hashable, tensors: Sequence[Tensor]) -> tuple[Any, Sequence[Tensor]] | None:
        """The `Sequence` of a call that was made, with its tensors; None if it is not repeated."""
        known = self._known.get(key)
        made = None if known is None else next((form.sequence for form in known.forms if form.holds(*tensors)), None)
        return None if made is None else (made, tensors)

    def _watched(self, key: Hashable, tensors: Sequence[Tensor]) -> contextlib.AbstractContextManager[Any]:
        """A block that makes the call, and is watched if such calls may come again."""
        native = launch.native()
        if native is None or not launch.in_use() or captures():  # a captured call may have other launches
            return contextlib.nullcontext()
        if key not in self._seen:
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen.add(key)
            return contextlib.nullcontext()
        known = self._known.get(key)
        forms = () if known is None else known.forms
        if any(form.holds(*tensors) for form in forms):  # the profiler's hooks are set, or it is not repeated
            return contextlib.nullcontext()
        return self._watching(key, tensors, forms, native)

    @contextlib.contextmanager
    def _watching(
        self, key: Hashable, tensors: Sequence[Tensor], forms: tuple[_Form, ...], native: launch.Native
    ) -> Iterator[None]:
        WATCHED.launches, WATCHED.parts = [], []
        foreign = _Foreign()
        try:
            with foreign:
                yield
            launches, parts = WATCHED.launches, WATCHED.parts
        finally:
            WATCHED.launches = WATCHED.parts = None
        for part in parts:
            part._wholes.add(self)
        shared = {id(one._shared): one._shared for one in (self, *parts) if one._shared is not None}
        alike = launches and not foreign.met and len(shared) < 2
        made = repetition(launches, tensors, next(iter(shared.values()), None)) if alike else None
        forms = (self._form(tensors, made, native), *forms[: native.module.MAX_FORMS - 1])
        if len(self._known) >= _MOST_KEYS:
            self._known.clear()
        of_all = native.module.Forms(tuple((form.known, form.sequence) for form in forms))
        checked = tuple((form.apart, form.sequence) for form in forms if form.apart is not None)
        again = native.module.Forms(checked).launch if checked else None
        self._known[key] = _Known(of_all.launch, again, forms)

    def _form(self, tensors: Sequence[Tensor], made: Any, native: launch.Native) -> _Form:
        form, count, apart = KnownForm(), len(tensors), None
        form.learn(tensors, [tensor.shape for tensor in tensors], range(count))
        facts = native.driver, form.holds, count, tuple(range(count))
        if made is not None and self._written is not None:
            gaps, same = places_of(tensors, (self._written % count,))
            if not same and are_apart(tensors, gaps, same):
                apart = native.module.Known(*facts, gaps, same)
        return _Form(form.holds, made, native.module.Known(*facts, (), (), checked=True), apart)


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
        again: the same for tensors that nothing has checked, or None; see `AttentionAdapter.again`.
    """

    adapter: Any
    values: Any
    launch: Callable[..., bool]
    again: Callable[..., bool] | None


def repetition(launches: Sequence[Launch], tensors: Sequence[Tensor], shared: Shared | None = None) -> Any:
    """The `Sequence` that repeats launches, given the tensors.

    None if the launcher cannot make one of them, or a pointer could be of more than one tensor.
    """
    temporaries = _Temporaries(tensors, () if shared is None else shared.tensors)
    places = []
    for one in launches:
        bases = map(_base_of, one.arguments)
        of = [temporaries.place(base) if isinstance(base, Tensor) else None for base in bases]
        if any(place is _UNCLEAR for place in of):
            return None
        places.append(of)
    if temporaries.room > _MOST_BYTES:
        return None
    counters = (len(tensors) + (temporaries.room > 0), 0)
    counted = any(_COUNTERS in of for of in places)
    places = [[counters if place is _COUNTERS else place for place in of] for of in places]
    steps = [one.launcher.step(one.programs, one.variant, *one.arguments) for one in launches]
    aligned = [at for at, tensor in enumerate(tensors) if not tensor.data_ptr() & 15]
    return sequence(steps, places, len(tensors), aligned, temporaries.room, counted, shared)


def _base_of(argument: Any) -> Any:
    """What has the memory of an argument: of a descriptor, its tensor."""
    return argument if isinstance(argument, Tensor) else getattr(argument, "base", None)


_UNCLEAR = (-1, -1)
_COUNTERS = (-2, 0)
_SHARED = ()


class _Temporaries:
    """Where pointers of a call point: into its tensors, to the stream's counters, or in memory that it allocated."""

    def __init__(self, tensors: Sequence[Tensor], shared: Sequence[Tensor]) -> None:
        self._tensors, self._shared = tensors, shared
        self._spans = [(tensor.data_ptr(), tensor.data_ptr() + extent_bytes(tensor)) for tensor in tensors]
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self._offsets: dict[int, int] = {}
        self.room = 0

    def place(self, argument: Tensor) -> tuple[int, ...] | None:
        """The operand's number and the bytes beyond its address; None for a tensor without memory, () for a shared."""
        address = argument.data_ptr()
        if address == 0:
            return None
        if is_counters(argument):
            return _COUNTERS
        if any(argument is one for one in self._shared):
            return _SHARED
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


def identified(values: Hashable, *given: Tensor | None) -> tuple[Hashable, tuple[Tensor, ...]]:
    """The key and the tensors of a call that may be repeated; one tensor may be in two places, and then is so again.

    Args:
        values: every value that the launches depend on.
        given: operands and destinations.
    """
    tensors = tuple({id(tensor): tensor for tensor in given if tensor is not None}.values())
    places = tuple(
        None if tensor is None else next(at for at, one in enumerate(tensors) if one is tensor) for tensor in given
    )
    return (values, places), tensors
