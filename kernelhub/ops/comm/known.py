"""The fast half of the checks of collectives: comparisons that let the usual call of a plan through.

Where they say no, the op's full check looks again, and says what is wrong if something is. A call like one before is
recognised, and launched where its kernel can repeat it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.whole_calls import WATCHED, Taken
from kernelhub.ops.arguments import alike, usable
from kernelhub.ops.known_calls import KnownCalls, is_repeated
from kernelhub.ops.operands import may_overlap, transformed
from kernelhub.ops.ready import Form, Ready
from kernelhub.ops.values import checks_devices

_MOST_READY = 16  # keys of a group whose results are ready
_MOST_BYTES = 2 << 20  # of what one of them has ready: calls with larger results wait for the GPU rather


def plain_operand(tensor: Any, dtype: torch.dtype, device: int) -> bool:
    """Whether it is an ordinary contiguous tensor of this dtype and device, and torch neither transforms nor traces."""
    try:
        plain = usable(tensor, dtype, device) and not tensor.is_nested and _in_order(tensor)
        return plain and not transformed()
    except RuntimeError:  # compressed rows have no such question
        return False


def plain_like(tensor: Any, shape: Sequence[int], dtype: torch.dtype, device: int) -> bool:
    """The same of a tensor of this shape, without the question for transforms."""
    try:
        return alike(tensor, shape, dtype, device) and _in_order(tensor)
    except RuntimeError:
        return False


def _in_order(tensor: Tensor) -> bool:
    """Whether its elements are one after the other. One alone may be a view that negates it: the full check looks."""
    return tensor.is_contiguous() and tensor.numel() != 1


def plain_place(
    place: Any, shape: Sequence[int], dtype: torch.dtype, device: int, operands: Sequence[Tensor | None]
) -> bool:
    """Whether it is an ordinary destination that is one of the operands or shares no memory with any."""
    if not plain_like(place, shape, dtype, device):
        return False
    return not may_overlap(place, [operand for operand in operands if operand is not place])


class GroupCalls:
    """The known calls of each group that a bound kernel serves: a launch is over the memory of the group's ranks."""

    __slots__ = ("_adapter", "_calls", "_last", "_plain", "repeats")

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self.repeats = is_repeated(adapter) and not checks_devices()  # which has the ranks compare each call
        self._calls: weakref.WeakKeyDictionary[Any, KnownCalls] = weakref.WeakKeyDictionary()
        self._last: tuple[Callable[[], Any], KnownCalls | None] = (lambda: None, None)
        self._plain: Any = None  # key of the last call whose results were allocated

    def of(self, group: Any) -> KnownCalls:
        """Those of a group; they are gone with it."""
        last, calls = self._last
        if calls is not None and last() is group:
            return calls
        found = self._calls.get(group)
        if found is None:
            found = self._calls[group] = KnownCalls(self._adapter.launch)
        self._last = weakref.ref(group), found
        return found

    def again(self, calls: KnownCalls, key: Any, given: tuple[Any, ...]) -> int:
        """As of `KnownCalls.launches`; a kernel that repeats no launches makes none."""
        return calls.launches(key, given) if self.repeats else calls.holds(key, given)

    def attach(self, calls: KnownCalls, key: Any, given: tuple[Any, ...], *arguments: Any) -> bool:
        """Let later calls like a known one make its launches at once; `arguments` are those of its launch."""
        return self.repeats and calls.attach(key, given, self._adapter.repeated, *arguments)

    def make_ready(self, calls: KnownCalls, key: Any, *made: Tensor) -> None:
        """Make results of later calls ready in `calls.results`, if calls like one that was launched at once follow it.

        Args:
            calls: of the group.
            key: of the call.
            made: its results, which it allocated.
        """
        learning = WATCHED.launched is not None
        if self._plain != key and not learning:
            self._plain = key
            return
        if len(calls.results) >= _MOST_READY:
            calls.results.clear()
        forms = tuple(Form(tuple(one.shape), one.dtype) for one in made)
        if all(form.shape for form in forms):
            ready = calls.results[key] = Ready(forms, made[0].device, _MOST_BYTES)
            if learning:
                WATCHED.taken = Taken(ready, made)


def group_type() -> Callable[..., Any]:
    """The type of process groups, which need no further question. No argument is of it in a torch without groups."""
    from torch import distributed as dist

    return dist.ProcessGroup if dist.is_available() else Tensor
