"""Recognises calls like one that an op's checks have let through: forms of all tensors, and memory that is apart.

What an op asks of tensors depends on their forms, which `KnownForm` compares at once, and on where the memory of
destinations is. With a form the extents are known too, so one address for each tensor decides: a destination is apart
from all else, or in the place of the operand that it was in when its call was checked, or as far from an operand with
which it interleaves: queries that are rotated in place, and keys, are columns of one projection's result.

A form has all sizes and strides, so there is one for each number of tokens. Learning takes far longer than a check: a
form is learned when its key comes again, and anew at ever rarer times, since calls of one key may have several forms.

The launcher's extension compares in C, a third of the time; before it is loaded, and without it, Python does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lost import failed
from kernelhub.dispatch.whole_calls import WATCHED
from kernelhub.ops.known_form import KnownForm
from kernelhub.ops.operands import extent_of, share_memory, transformed

_MOST_CALLS = 256
_MOST_MISSED = 4096
_MOST_TRIED = 4  # calls after which a kernel that cannot repeat them is not asked again


Apart = tuple[tuple[int, int, int, int], ...]
Same = tuple[tuple[int, int], ...]


class Repeatable:
    """A base class of adapters whose launches a known call may make at once."""

    def repeated(self, *arguments: Any, **named: Any) -> Any:
        """Of a launch with these arguments what `KnownCalls.attach` takes, or None."""
        return None


def is_repeated(adapter: Repeatable) -> bool:
    """Whether known calls may make the launches of this adapter. An audit replaces `launch`, and sees all calls."""
    return type(adapter).repeated is not Repeatable.repeated and "launch" not in vars(adapter)


class KnownCalls:
    """The calls that an op let through, for one bound kernel. Threads may share it."""

    __slots__ = ("_attached", "_calls", "_launch", "_launching", "_missed", "_reports", "_tried", "results")

    def __init__(self, launch: Callable[..., Any] | None = None, reports: bool = True) -> None:
        """`launch` is of the adapter, whose failures `launches` reports if it `reports`; else the caller does.

        Attributes:
            results: the caller's, of calls that are launched at once, by their keys.
        """
        self._launch, self._reports = launch, reports and launch is not None
        self.results: dict[Hashable, Any] = {}
        self._calls: dict[Hashable, Callable[[tuple[Any, ...]], bool]] = {}
        self._missed: dict[Hashable, int] = {}  # how often a call with this key was not known
        self._launching: dict[Hashable, Callable[[tuple[Any, ...]], int]] = {}  # those that launch, too
        self._attached: dict[Hashable, Any] = {}  # their sequences
        self._tried: dict[Hashable, int] = {}  # how often such was asked for

    def __contains__(self, key: Hashable) -> bool:
        """Whether a call with this key was learned."""
        return key in self._calls

    def holds(self, key: Hashable, given: tuple[Any, ...]) -> bool:
        """Whether the checks would let a call through again.

        Args:
            key: every value that the checks look at, but tensors; among them a shape, by which calls differ. None
                for a call that has to be checked.
            given: operands and destinations, as of `learn`. They may be anything.
        """
        call = self._calls.get(key)
        return call is not None and forward_ad._current_level < 0 and call(given)

    def launches(self, key: Hashable, given: tuple[Any, ...]) -> int:
        """0 for a call that does not hold, 1 for one that does, 2 for one that was launched, too: see `attach`."""
        launch = self._launching.get(key)
        if launch is None:
            return int(self.holds(key, given))
        try:
            state = launch(given) if forward_ad._current_level < 0 else 0
        except Exception as error:
            if self._reports:
                failed(self._launch, error)
            raise
        if state == 2 and WATCHED.launched is not None:
            WATCHED.launched.append((self._launch, getattr(launch, "__self__", None), given))
        return state

    def launcher(self, key: Hashable) -> tuple[Callable[[tuple[Any, ...]], int], Any]:
        """Of calls with a key that is attached the half of `launches` that is not Python, and the adapter's launch.

        The caller does the other half: forward differentiation, failures, `WATCHED`. It launches calls of the form that
        was attached last; when another is learned, or the adapter repeats no launch of before, it says no.
        """
        return self._launching[key], self._launch

    def attach(self, key: Hashable, given: tuple[Any, ...], repeated: Callable[..., Any], *arguments: Any) -> bool:
        """Let later calls like a known one, which was launched just now, make its launches at once; whether they do.

        Args:
            key: every value that the launches depend on, too.
            given: as of `launches`.
            repeated: of the adapter; with the arguments of its launch it gives the `Sequence` of the launches and the
                tensors that it takes, or None.
        """
        known = getattr(self._calls.get(key), "__self__", None)  # of the extension
        before = self._attached.get(key)
        tried = 0 if before is not None and before.closed() else self._tried.get(key, 0)
        if known is None or tried >= _MOST_TRIED:
            return False
        found = repeated(*arguments)
        if found is not None or not captured(given):  # a captured call is not repeated, one after the capture may be
            self._tried[key] = tried + 1
        if found is None:
            return False
        sequence, tensors = found
        present = [tensor for tensor in given if tensor is not None]
        places = [_place_of(tensor, present) for tensor in tensors]
        if None in places:  # it was made by the call
            return False
        known.attach(sequence, tuple(places))
        self._attached[key] = sequence
        self._launching[key] = known.launch
        return True

    def learn(self, key: Hashable, given: Sequence[Any], destinations: int, fresh: int = 0) -> None:
        """Remember a call that the checks have let through, the second, fourth, eighth time that it was not known.

        Args:
            key: as of `holds`.
            given: its operands, then its destinations; None for those that it has not. A call with anything that is no
                tensor, such as packed weights, is not remembered.
            destinations: how many of them are destinations.
            fresh: how many, the last ones, each call with this key allocates for itself, in this form. They are not
                compared.
        """
        if key is None or transformed():  # such tensors have no memory to compare
            return
        missed = self._missed.get(key, 0) + 1
        if len(self._missed) >= _MOST_MISSED:
            self._missed.clear()
        self._missed[key] = missed
        if missed == 1 or missed & (missed - 1):
            return
        present = [place for place, tensor in enumerate(given) if tensor is not None]
        tensors = [tensor for tensor in given if tensor is not None]
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            return
        compared = tensors[: len(tensors) - fresh]
        if fresh and (None in given[len(given) - fresh :] or not compared):
            return
        written = [at for at, place in enumerate(present) if len(given) - destinations <= place < len(given) - fresh]
        form = KnownForm()
        form.learn(compared, [tensor.shape for tensor in compared], range(len(compared)))
        facts = form.holds, len(given), tuple(present), *places_of(compared, written), fresh
        call = None if HUB.known_of is None else HUB.known_of(*facts)
        if len(self._calls) >= _MOST_CALLS:
            self._calls.clear()
            self._launching.clear()
            self._attached.clear()
            self._tried.clear()
            self.results.clear()
        self._launching.pop(key, None)
        self._attached.pop(key, None)
        self.results.pop(key, None)
        self._tried.pop(key, None)
        self._calls[key] = call or _in_python(*facts)


def captured(given: Sequence[Any]) -> bool:
    """Whether a call with such operands goes into a CUDA graph."""
    on_gpu = any(isinstance(one, Tensor) and one.is_cuda for one in given)
    return on_gpu and torch.cuda.is_current_stream_capturing()


def _place_of(tensor: Tensor, present: Sequence[Tensor]) -> int | None:
    """Which of these a tensor is, or is a view of that begins where it does, as it will in all calls of the form."""
    same = next((place for place, one in enumerate(present) if one is tensor), None)
    if same is not None:
        return same
    begin = tensor.data_ptr()
    there = [place for place, one in enumerate(present) if one.data_ptr() == begin and one.numel()]
    return there[0] if len(there) == 1 else None


def places_of(tensors: Sequence[Tensor], written: Collection[int]) -> tuple[Apart, Same]:
    """How far destinations are from all other tensors.

    Args:
        tensors: of a call.
        written: indices of the destinations.

    Returns:
        For each destination and other tensor their indices, and the differences of their addresses, exclusive, within
        which they may share memory, two such ranges for tensors that interleave; and the pairs that begin at one
        address.
    """
    apart, same = [], []
    for one in written:
        for other, tensor in enumerate(tensors):
            if other == one or (other in written and other > one):
                continue
            between = tensor.data_ptr() - tensors[one].data_ptr()
            least, most = -extent_of(tensor), extent_of(tensors[one])
            if not between and tensor.numel():
                same.append((one, other))
            elif least < between < most and not share_memory(tensors[one], tensor):  # at this distance they interleave
                apart += [(one, other, least, between), (one, other, between, most)]
            else:
                apart.append((one, other, least, most))
    return tuple(apart), tuple(same)


def are_apart(tensors: Sequence[Tensor], apart: Apart, same: Same) -> bool:
    """Whether tensors of the form of those of `places_of` are as far apart."""
    begins = [tensor.data_ptr() for tensor in tensors]
    for one, other, least, most in apart:
        if least < begins[other] - begins[one] < most:
            return False
    return not same or all(begins[one] == begins[other] for one, other in same)


def _in_python(
    holds: Callable[..., bool], operands: int, present: tuple[int, ...], apart: Apart, same: Same, fresh: int = 0
) -> Callable[[tuple[Any, ...]], bool]:
    """The function that says whether a call is known.

    Args:
        holds: whether tensors have the form; none of them may be nested.
        operands: how many operands and destinations a call has.
        present: places of those that are tensors; the others are None.
        apart, same: of the tensors, see `places_of`.
        fresh: how many of the tensors, the last ones, are not compared.
    """
    absent = tuple(place for place in range(operands) if place not in present)
    present = present[: len(present) - fresh]
    only = present[0]
    pick: Callable[[Any], Any] = itemgetter(*present) if len(present) > 1 else lambda given: (given[only],)

    def known(given: tuple[Any, ...]) -> bool:
        for place in absent:
            if given[place] is not None:
                return False
        tensors = pick(given)
        try:
            for tensor in tensors:
                if tensor.is_nested:  # of which torch's guards die
                    return False
        except AttributeError:
            return False
        return holds(*tensors) and are_apart(tensors, apart, same)

    return known
