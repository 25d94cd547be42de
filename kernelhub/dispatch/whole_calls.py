"""Whole calls that come again: the launcher's extension makes them before the op's function looks anything up.

An op's function first asks `Op.again`, with all its arguments, and a plan's `run` asks `Runs.again`. A call that comes
again is one with equal values, and with tensors that a known call (`ops.known_calls`) would let through and
launch. Then nothing that the function computes could differ: its key and the kernel follow from the values and from the
forms of the tensors, and the launches from those and from where the tensors' memory is.

The extension counts the calls that it does not recognise. The fourth, eighth, sixteenth of a kind is made by `_learn`,
which watches what the function does with its arguments. A call is learned if

- it made the launches of one known call, all of whose operands are arguments or results of it,
- every tensor among its arguments is such an operand, or one of `Kept`; one that is given twice is so again in each
  call,
- all other arguments are immutable values, or process groups, which later calls have to give again,
- what it returns are arguments, new tensors that fill their memory, or tensors that came from a `Stock`; or what a
  function makes of the last and an argument.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lost import failed

_VALUES = (type(None), bool, int, float, str, torch.dtype)


class Stock(Protocol):
    """What has the results of calls, some of them ready.

    Attributes:
        ready: by stream, a list of what later calls get: the results for which `makers` has None.
    """

    ready: dict[int, list[tuple[Tensor, ...]]]

    def refill(self, stream: int | None) -> tuple[Tensor, ...]:
        """The same for a call now, with more for later calls on this stream; None: with no more, as of a capture."""

    def makers(self) -> tuple[Callable[[], Tensor] | None, ...] | None:
        """For each result of a call what makes it, or None; None for all if the extension cannot make them."""


class Taken(NamedTuple):
    """What a watched call took from a stock: the results of the call, all of them in the order of `makers`."""

    stock: Stock
    results: tuple[Tensor, ...]


class FreshResults(NamedTuple):
    """What makes the results of calls of an op.

    Attributes:
        form: of the extension: compares the operands of the known call that are not made.
        stock: has the small ones, if there is one.
        in_stock: of each result whether the stock has it; empty without one.
        pools_at, pools: an address at which this number has to be; no address if that is 0.
    """

    form: Any
    stock: Stock | None
    in_stock: tuple[bool, ...]
    pools_at: int = 0
    pools: int = 0


class Finished(NamedTuple):
    """What a watched call returns, as ``finish(results, argument)`` made it of what it took."""

    result: Any
    finish: Callable[[tuple[Tensor, ...], Any], Any]
    argument: Any


class Kept(NamedTuple):
    """Tensors that a watched call read on the host, which a later one has to give again.

    Attributes:
        contents: one in CPU memory, contiguous, that has to hold what it did.
        others: of which it is enough that they are the same objects.
    """

    contents: Tensor
    others: tuple[Tensor, ...]


class _Watched(threading.local):
    """What this thread did while it learns.

    Attributes:
        launched: the known calls: the adapter's method, the known call and its operands; None while it does not learn.
        taken, finished, kept: of the last call; or None.
    """

    launched: list[tuple[Any, Any, Sequence[Any]]] | None = None
    taken: Taken | None = None
    finished: Finished | None = None
    kept: Kept | None = None


WATCHED = _Watched()


def not_learned() -> None:
    """Let the call that this thread makes be no call of the extension."""
    if WATCHED.launched is not None:
        WATCHED.launched += [(None, None, ())] * 2


class Runs:
    """The whole calls of a plan, whose kernel is bound.

    Attributes:
        again: given the arguments of a run, makes it and returns its result, if it is like one before; else None. It is
            not called before `HUB.calls_of` is there.
    """

    __slots__ = ("_bound", "_run", "again")

    def __init__(self, bound: Bound, run: Callable[..., Any]) -> None:
        self._bound = bound  # alive as long as its runs, so that they count, and errors find it
        self._run = run
        self.again: Callable[..., Any] = self._begin

    def _begin(self, *arguments: Any) -> Any:
        self.again = calls_of(self._run, []).again
        return self.again(*arguments)


def calls_of(function: Callable[..., Any], contexts_used: list[bool]) -> Any:
    """`Calls` of the extension, of a function that takes all arguments by place.

    Args:
        function: makes a call.
        contexts_used: not empty if a call may be in a `use` block, inside of which the function has to decide.
    """
    assert HUB.calls_of is not None
    calls: Any
    call_of: Callable[..., Any]
    calls, call_of = HUB.calls_of(lambda *arguments: _learn(function, calls, call_of, arguments), contexts_used)
    return calls


def _learn(function: Callable[..., Any], calls: Any, call_of: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Make a call, and let later ones like it be made by the extension if they can.

    Args:
        function: makes the call of these arguments.
        calls: `Calls` of the extension.
        call_of: makes a `Call`.
        arguments: of the call, all of them.
    """
    generation = HUB.generation
    before, WATCHED.launched = WATCHED.launched, []
    WATCHED.taken = WATCHED.finished = WATCHED.kept = None
    try:
        result = function(*arguments)
        launched, seen = WATCHED.launched, (WATCHED.taken, WATCHED.finished, WATCHED.kept)
    finally:
        WATCHED.launched = before
        WATCHED.taken = WATCHED.finished = WATCHED.kept = None  # which would keep results alive
    facts = facts_of(calls.flat(*arguments), result, *launched[0], *seen) if len(launched) == 1 else None
    if facts is not None:
        with HUB.lock:
            if generation == HUB.generation:
                needed, more = facts
                calls.add(arguments, call_of(*needed, **more))
    return result


def facts_of(
    arguments: tuple[Any, ...] | None,
    result: Any,
    launch: Any,
    known: Any,
    operands: Sequence[Any],
    taken: Taken | None = None,
    finished: Finished | None = None,
    kept: Kept | None = None,
) -> tuple[Any, ...] | None:
    """What a `Call` of the extension takes; None for a call that is not made by it.

    Args:
        arguments: of the call, with the tensors of a list one by one.
        result: what it returned.
        launch: the adapter's method that was not called.
        known: the known call that was launched instead.
        operands: of the known call.
        taken, finished, kept: of the call.
    """
    bound = HUB.ledger.bound_of(getattr(launch, "__self__", None))
    if arguments is None or bound is None:
        return None
    tensors = [one for one in arguments if isinstance(one, Tensor)]
    again: tuple[Tensor, ...] = () if kept is None else (kept.contents, *kept.others)
    if not all(any(one is of for of in (*operands, *again)) for one in tensors):
        return None
    weak = [at for at, one in enumerate(arguments) if not _is_value(one) and not any(one is of for of in operands)]
    groups = [arguments[at] for at in weak if not isinstance(arguments[at], Tensor)]
    if not all(isinstance(one, _group_types()) for one in groups):
        return None
    finish, at, fresh = None, -1, None
    results = result if type(result) is tuple else (result,)
    if finished is not None and taken is not None and finished.result is result:
        finish, results = finished.finish, taken.results
        at = next((at for at, one in enumerate(arguments) if one is finished.argument), -1)
        if at < 0 and finished.argument is not None:
            return None
    made = [one for one in results if isinstance(one, Tensor) and not any(one is of for of in tensors)]
    if made and taken is not None and all(any(one is of for of in taken.results) for one in made):
        made, of_stock = list(taken.results), taken.stock.makers()
        if of_stock is None:
            return None
        makers: list[Callable[[], Tensor] | None] = list(of_stock)
        stock: Stock | None = taken.stock
    else:
        makers, stock = [_maker_of(one) for one in made], None
        if None in makers:
            return None
        fresh = HUB.fresh_of(known, operands, made) if made and HUB.fresh_of is not None else None
    places = {id(one): at for at, one in enumerate((*arguments, *made)) if isinstance(one, Tensor)} | {id(None): -1}
    sources = [places.get(id(one)) for one in operands]
    returned = [places.get(id(one)) for one in results]
    if None in sources or None in returned:
        return None
    single = type(result) is not tuple and finish is None
    counts, fails = bound.counter.__next__, functools.partial(_failed, bound)
    more: dict[str, Any] = {"finish": finish, "at": at, "weak": sum(1 << at for at in weak)}
    if fresh is not None:
        more["form"] = fresh.form
        if fresh.stock is not None:
            stock, more["pools"], more["num_pools"] = fresh.stock, fresh.pools_at, fresh.pools
            makers = [None if ready else made for ready, made in zip(fresh.in_stock, makers, strict=True)]
    if kept is not None:
        memory = kept.contents
        if not memory.is_cpu or not memory.is_contiguous():
            return None
        more["contents_of"] = next((at for at in weak if arguments[at] is memory), -1)
        more["contents_at"] = memory.data_ptr()
        more["contents"] = ctypes.string_at(memory.data_ptr(), memory.nbytes)
    if stock is not None and None in makers:
        more |= {"stock": stock.ready, "refill": stock.refill}
    return (known, tuple(sources), tuple(returned), single, tuple(makers), counts, fails), more


@functools.cache
def _group_types() -> tuple[type, ...]:
    """The types of arguments that are no values: a call has to give the same object again, which no call keeps."""
    return (torch.distributed.ProcessGroup,) if torch.distributed.is_available() else ()


def _failed(bound: Bound, error: Exception) -> None:
    failed(bound.adapter.launch, error)


def _is_value(one: Any) -> bool:
    return type(one) in _VALUES or (type(one) is tuple and all(map(_is_value, one)))


def _maker_of(one: Tensor) -> Callable[[], Tensor] | None:
    """What makes an uninitialised tensor like a new one; None for a view, and for one that does not fill its memory."""
    extent = sum((size - 1) * step for size, step in zip(one.shape, one.stride(), strict=True)) + 1
    whole = one.numel() and one.storage_offset() == 0 and one.untyped_storage().nbytes() == extent * one.element_size()
    if type(one) is not Tensor or not whole or one.requires_grad:
        return None
    return maker(tuple(one.shape), one.stride(), one.dtype, one.device)


def maker(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    """What makes uninitialised tensors of a form. They may be on the current device instead."""
    form = shape, stride
    usual = functools.partial(torch.empty_strided, *form, dtype=dtype, device=device)
    try:
        # What Inductor's code allocates with, in a third of the time, on the current device; on another one no call is
        # made by the extension.
        quick = functools.partial(getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}"), *form, dtype)
        made = quick()
    except (AttributeError, TypeError, RuntimeError):  # another torch
        return usual
    right = (made.shape, made.stride(), made.dtype, made.device) == (*form, dtype, device)
    return quick if right else usual
