"""What vLLM's layers remember of their calls, so that later ones are made at once; see `kernelhub.ops.layer_calls`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from kernelhub.dispatch.op import Op
from kernelhub.ops.layer_calls import LayerCalls, Repeats, no_call


class Remembered:
    """Calls of one kind that a layer makes.

    Attributes:
        _launch: as `LayerCalls.layer` makes it.
    """

    _launch: Callable[..., bool] = staticmethod(no_call)
    _calls: LayerCalls
    _kept: tuple[Tensor | None, ...] = ()  # what `_launch` was made with

    def _is_due(self, cache: Tensor, form: Hashable) -> bool:
        """Whether a call that was made is to be learned: of a new cache, or where `LayerCalls.is_due`."""
        return self._launch is no_call or self._kept[0] is not cache or self._calls.is_due(form)

    def _learn(
        self,
        op: Op[Any],
        values: Hashable,
        cache: Tensor,
        tensors: Sequence[Tensor],
        form: Hashable,
        given: tuple[Tensor, Tensor],
        step: Sequence[Tensor],
        repeats: Callable[[], Repeats | None],
        operands: Sequence[Tensor],
        written: Sequence[Tensor],
    ) -> None:
        """Let later calls like one that was made be made at once, if `_is_due`.

        Args:
            op: that made it.
            values: what the layer's calls have in common, beside its tensors.
            cache: as vLLM gave it.
            tensors: of the layer.
            form: of the step.
            given: the two that are new in each call, as vLLM has them.
            step: tensors of the step.
            repeats: makes what makes such calls.
            operands: of that.
            written: which of them are destinations.
        """
        if self._launch in (no_call, _unlaunched) or not _same((cache, *tensors), self._kept):
            self._calls = LayerCalls.of(op, values)
            self._kept, self._launch = (cache, *tensors), self._calls.layer(cache, tensors)
            if self._launch is no_call:  # without the launcher; it is looked for where a call is due
                self._launch = _unlaunched
            if form in self._calls or not self._calls.is_due(form):
                return
        self._calls.learn(form, repeats(), given, tensors, step, operands, written)

    def _forget(self) -> None:
        """Drop all references to the cache."""
        self._kept, self._launch = (), no_call


class Remembering(Remembered):
    """A base class of layers, which forget their calls where vLLM sets one of their attributes."""

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if not name.startswith("_"):  # as `sinks` and `scale`
            object.__setattr__(self, "_launch", no_call)


class Scales:
    """The scales of a layer's cache that calls were learned with.

    torch's `Module` finds two buffers by a function of Python in 1.5 us, half of what the rest of a call takes without
    the driver. So the dictionary that has them is kept.
    """

    __slots__ = ("_held", "_k", "_layer", "_v")

    def __init__(self) -> None:
        self._layer: Any = None
        self._held: dict[str, Any] | None = None
        self._k: Any = None
        self._v: Any = None

    def take(self, layer: Any) -> tuple[Tensor, Tensor]:
        """Those that the layer has now."""
        found = k, v = layer._k_scale, layer._v_scale
        own = getattr(layer, "__dict__", {})
        places = own, own.get("_buffers") or {}, own.get("_parameters") or {}
        holds = (held for held in places if held.get("_k_scale") is k and held.get("_v_scale") is v)
        self._layer, self._k, self._v, self._held = layer, k, v, next(holds, None)
        return found

    def are_of(self, layer: Any) -> bool:
        """Whether the layer has these."""
        held = self._held
        if held is None or layer is not self._layer:
            return layer._k_scale is self._k and layer._v_scale is self._v
        return held.get("_k_scale") is self._k and held.get("_v_scale") is self._v


def _unlaunched(*arguments: Any) -> bool:
    return False


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))
