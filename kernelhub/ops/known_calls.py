"""Recognises calls like one that an op's checks have let through: forms of all tensors, and memory that is apart.

What an op asks of tensors depends on their forms, which `KnownForm` compares at once, and on where the memory of
destinations is. With a form the extents are known too, so one address for each tensor decides: a destination is apart
from all else, or in the place of the operand that it was in when its call was checked.

A form has all sizes and strides, so there is one for each number of tokens. Learning takes far longer than a check: a
form is learned when its key comes again, and anew at ever rarer times, since calls of one key may have several forms.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import forward_ad

from kernelhub.ops.known_form import KnownForm
from kernelhub.ops.operands import extent_of

_MOST_CALLS = 256
_MOST_MISSED = 4096


class _Call(NamedTuple):
    """A form of call.

    Attributes:
        absent: places of what is None.
        tensors: of a call's operands and destinations, those that are tensors.
        holds: whether those have the form; none of them may be nested.
        apart: for each destination and other tensor their places, and the differences of their addresses, exclusive,
            within which they may share memory.
        same: pairs of places that begin at one address.
    """

    absent: tuple[int, ...]
    tensors: Callable[[Sequence[Any]], Sequence[Any]]
    holds: Callable[..., bool]
    apart: tuple[tuple[int, int, int, int], ...]
    same: tuple[tuple[int, int], ...]


class KnownCalls:
    """The calls that an op let through, for one bound kernel. Threads may share it."""

    __slots__ = ("_calls", "_missed")

    def __init__(self) -> None:
        self._calls: dict[Hashable, _Call] = {}
        self._missed: dict[Hashable, int] = {}  # how often a call with this key was not known

    def holds(self, key: Hashable, given: Sequence[Any]) -> bool:
        """Whether the checks would let a call through again.

        Args:
            key: every value that the checks look at, but tensors; among them a shape, by which calls differ. None
                for a call that has to be checked.
            given: operands and destinations, as of `learn`. They may be anything.
        """
        call = self._calls.get(key)
        if call is None or forward_ad._current_level >= 0:
            return False
        for place in call.absent:
            if given[place] is not None:
                return False
        tensors = call.tensors(given)
        try:
            for tensor in tensors:
                if tensor.is_nested:  # of which torch's guards die
                    return False
        except AttributeError:
            return False
        if not call.holds(*tensors):
            return False
        begins = [tensor.data_ptr() for tensor in tensors]
        for one, other, least, most in call.apart:
            if least < begins[other] - begins[one] < most:
                return False
        return not call.same or all(begins[one] == begins[other] for one, other in call.same)

    def learn(self, key: Hashable, given: Sequence[Any], destinations: int) -> None:
        """Remember a call that the checks have let through, the second, fourth, eighth time that it was not known.

        Args:
            key: as of `holds`.
            given: its operands, then its destinations; None for those that it has not. A call with anything that is no
                tensor, such as packed weights, is not remembered.
            destinations: how many of them are destinations.
        """
        if key is None or forward_ad._current_level >= 0:
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
        written = [at for at, place in enumerate(present) if place >= len(given) - destinations]
        apart, same = [], []
        for one in written:
            for other, tensor in enumerate(tensors):
                if other == one or (other in written and other > one):
                    continue
                if tensor.data_ptr() == tensors[one].data_ptr() and tensor.numel():
                    same.append((one, other))
                else:
                    apart.append((one, other, -extent_of(tensor), extent_of(tensors[one])))
        form = KnownForm()
        form.learn(tensors, [tensor.shape for tensor in tensors], range(len(tensors)))
        only = present[0]
        pick = itemgetter(*present) if len(present) > 1 else lambda given: (given[only],)
        absent = tuple(place for place in range(len(given)) if place not in present)
        if len(self._calls) >= _MOST_CALLS:
            self._calls.clear()
        self._calls[key] = _Call(absent, pick, form.holds, tuple(apart), tuple(same))
