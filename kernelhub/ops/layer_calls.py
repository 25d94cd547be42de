"""Calls of an engine's layers, which the launcher's extension makes with one look at the tensors that differ.

A layer of an engine calls an op with its own caches, with the metadata of the step, which all layers share, and with
two tensors that are new in each call: queries and a destination, or keys and values that it writes to its caches. The
engine keeps the others as they are: caches are replaced, not changed, and so is a step's metadata. So their forms and
addresses are found once, and a call compares only those two. Whatever else would make a difference ends it: settings,
`use` blocks, another device or stream, profilers' hooks, a capture, forward differentiation, memory that overlaps. Then
the engine makes its call as ever.

An engine keeps one `LayerCalls` for layers that have all values in common, and learns a call after it made it:

    launch = calls.layer(cache, tensors)  # once for each layer and cache
    if launch(q, out, cache, form, *step):
        return
    ...  # the call of the op
    if calls.is_due(form):
        calls.learn(form, repeats, (q, out), tensors, step, operands, [out])
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lost import failed
from kernelhub.dispatch.op import Op
from kernelhub.ops.known_calls import captured, places_of
from kernelhub.ops.known_form import KnownForm

_MOST_FORMS = 256  # of steps
_MOST_KNOWN = 32  # forms of the tensors that layers and steps keep
_MOST_TENSORS = 8  # that a layer keeps


class Repeats(NamedTuple):
    """What makes calls with the same values as one before.

    Attributes:
        launch: of the adapter, whose failures are reported.
        again: makes the launches, given the tensors of a call; see `AttentionAdapter.again`.
        tick: counts a call.
        generation: `HUB.generation` when it was selected.
    """

    launch: Callable[..., Any]
    again: Callable[..., bool]
    tick: Callable[[], Any]
    generation: int = -1


class LayerCalls:
    """Calls of layers that have all values in common."""

    __slots__ = ("_known", "_launches", "_missed", "_op")

    def __init__(self, op: Op[Any]) -> None:
        self._op = op
        self._launches: dict[Hashable, Any] = {}
        self._missed: dict[Hashable, int] = {}
        self._known: list[tuple[int, Any]] = []

    @classmethod
    def of(cls, op: Op[Any], values: Hashable) -> LayerCalls:
        """The calls of layers with these values."""
        with HUB.lock:
            made: LayerCalls = op.layers.setdefault(values, cls(op))
        return made

    def clear(self) -> None:
        """Forget all calls: settings changed, or a device is lost."""
        self._launches.clear()
        self._missed.clear()
        self._known.clear()

    def layer(self, cache: Any, tensors: Sequence[Tensor]) -> Callable[..., bool]:
        """What makes the calls of one layer, and says whether it did.

        It takes the two tensors that differ, the layer's cache, the form of the step and the step's tensors. It makes
        no call with another cache. The form says what a call depends on beside the layers' values and the tensors.

        Args:
            cache: what the tensors are of.
            tensors: of the layer, which stay as they are.
        """
        makes, calls = HUB.layers_of, self._op.calls
        if makes is None or calls is None or not 0 < len(tensors) <= _MOST_TENSORS:
            return no_call
        launch: Callable[..., bool] = makes.layer(calls, self._launches, cache, tuple(tensors)).launch
        return launch

    def __contains__(self, form: Hashable) -> bool:
        """Whether a call of this form was learned."""
        return form in self._launches

    def is_due(self, form: Hashable) -> bool:
        """Whether a call that was not repeated is to be learned: the second, fourth, eighth of a form."""
        if len(self._missed) >= _MOST_FORMS:
            self._missed.clear()
        missed = self._missed[form] = self._missed.get(form, 0) + 1
        return missed > 1 and not missed & (missed - 1)

    def learn(
        self,
        form: Hashable,
        repeats: Repeats | None,
        given: tuple[Tensor, Tensor],
        layer: Sequence[Tensor],
        step: Sequence[Tensor],
        operands: Sequence[Tensor],
        written: Sequence[Tensor],
    ) -> bool:
        """Let later calls like one that was made be made at once; whether they are.

        Args:
            form: of the step.
            repeats: what makes calls with these values.
            given: the two that are new in each call, as the engine has them.
            layer: the layer's tensors.
            step: the step's tensors.
            operands: of `repeats.again`. Those of `given` among them may be views, which follow from the form of
                `given` and the step's, and begin where those do.
            written: which of the operands are destinations.
        """
        makes, calls = HUB.layers_of, self._op.calls
        sequence_of = getattr(getattr(repeats and repeats.again, "__self__", None), "sequence_of", None)
        if makes is None or calls is None or repeats is None or sequence_of is None:
            return False
        if captured(operands):
            return False
        sequence = sequence_of(*operands)
        sources = _sources_of(operands, given, (*layer, *step))
        if sequence is None or sources is None:
            return False
        destinations = [at for at, one in enumerate(operands) if any(one is other for other in written)]
        apart, same = places_of(operands, destinations)
        if same:
            return False
        forms = [self._known_of(tensors) for tensors in (given, layer, step)]
        if None in forms:
            return False
        fails = functools.partial(failed, repeats.launch)
        with HUB.lock:
            if repeats.generation != HUB.generation:
                return False
            if len(self._launches) >= _MOST_FORMS:
                self._launches.clear()
            self._launches[form] = makes.layers(calls, sequence, *forms, sources, apart, repeats.tick, fails)
        return True

    def _known_of(self, tensors: Sequence[Tensor]) -> Any:
        """The extension's `Known` of tensors of a form, the same one for the same form."""
        given = tuple(tensors)
        for count, known in self._known:
            if count == len(given) and known.holds(given):
                return known
        form = KnownForm()
        form.learn(given, [tensor.shape for tensor in given], range(len(given)))
        holds = None if HUB.known_of is None else HUB.known_of(form.holds, len(given), (*range(len(given)),), (), (), 0)
        known = getattr(holds, "__self__", None)
        if known is not None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known.append((len(given), known))
        return known


def no_call(*arguments: Any) -> bool:
    """The calls of a layer of which nothing is known."""
    return False


def _sources_of(
    operands: Sequence[Tensor], given: tuple[Tensor, Tensor], kept: Sequence[Tensor]
) -> tuple[int, ...] | None:
    """Which of the given and the kept tensors the operands are; None if one of them is none."""
    found = []
    for operand in operands:
        source = next((at for at, one in enumerate((*given, *kept)) if one is operand), None)
        if source is None:  # a view of one
            begin = operand.data_ptr()
            source = next((at for at, one in enumerate(given) if one.numel() and one.data_ptr() == begin), None)
        if source is None:
            return None
        found.append(source)
    return tuple(found) if {0, 1} <= set(found) else None
