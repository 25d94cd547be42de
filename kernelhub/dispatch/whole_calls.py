"""Whole calls that come again: the launcher's extension makes them before the op's function looks anything up.

An op's function first asks `Op.again`, with all its arguments, and a plan's `run` asks `Runs.again`. A call that comes
again is one with equal values, and with tensors that a known call (`ops.known_calls`) would let through and
launch. Then nothing that the function computes could differ: its key and the kernel follow from the values and from the
forms of the tensors, and the launches from those and from where the tensors' memory is.

The extension counts the calls that it does not recognise. The fourth, eighth, sixteenth of a kind is made by `_learn`,
which watches what the function does with its arguments. A call is learned if

- it made the launches of one known call, all of whose operands are arguments or results of it,
- every tensor among its arguments is such an operand; one that is given twice is so again in each call,
- all other arguments are immutable values,
- what it returns are arguments, and new tensors that fill their memory.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lost import failed

_VALUES = (type(None), bool, int, float, str, torch.dtype)


class _Watched(threading.local):
    """Known calls that this thread launched while it learns: the adapter's method, the known call and its operands."""

    launched: list[tuple[Any, Any, Sequence[Any]]] | None = None


WATCHED = _Watched()


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
    try:
        result = function(*arguments)
        launched = WATCHED.launched
    finally:
        WATCHED.launched = before
    facts = facts_of(calls.flat(*arguments), result, *launched[0]) if len(launched) == 1 else None
    if facts is not None:
        with HUB.lock:
            if generation == HUB.generation:
                calls.add(arguments, call_of(*facts))
    return result


def facts_of(
    arguments: tuple[Any, ...] | None, result: Any, launch: Any, known: Any, operands: Sequence[Any]
) -> tuple[Any, ...] | None:
    """What a `Call` of the extension takes; None for a call that is not made by it.

    Args:
        arguments: of the call, with the tensors of a list one by one.
        result: what it returned.
        launch: the adapter's method that was not called.
        known: the known call that was launched instead.
        operands: of the known call.
    """
    bound = HUB.ledger.bound_of(getattr(launch, "__self__", None))
    if arguments is None or bound is None:
        return None
    tensors = [one for one in arguments if isinstance(one, Tensor)]
    if not all(any(one is of for of in operands) for one in tensors):
        return None
    if not all(isinstance(one, Tensor) or _is_value(one) for one in arguments):
        return None
    results = result if type(result) is tuple else (result,)
    made = [one for one in results if isinstance(one, Tensor) and not any(one is of for of in tensors)]
    makers = [_maker_of(one) for one in made]
    places = {id(one): at for at, one in enumerate((*arguments, *made)) if isinstance(one, Tensor)} | {id(None): -1}
    sources = [places.get(id(one)) for one in operands]
    returned = [places.get(id(one)) for one in results]
    if None in makers or None in sources or None in returned:
        return None
    single = type(result) is not tuple
    counts, fails = bound.counter.__next__, functools.partial(_failed, bound)
    return known, tuple(sources), tuple(returned), single, tuple(makers), counts, fails


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
