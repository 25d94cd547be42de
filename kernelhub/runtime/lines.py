"""The error for a call that is not ready in a sealed process, with the line that makes it ready.

It is built while a call is refused, perhaps during a CUDA-graph capture: nothing here uses a device.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.forms import written
from kernelhub.dispatch.gate import Caller
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.op import DryRun, device_of
from kernelhub.errors import NotWarmed
from kernelhub.ops.models.features import a_model_may_ask

_ADVICE = {
    "sync": "{what} is on the device: give its values on the host (seq_lens_cpu=, cu_seqlens_q_cpu= of plan.begin), or "
    "before sealing select a kernel that reads no lengths; kernelhub.explain({op!r}, ...) lists them",
    "pack": "pack weights while the model is loaded, before kernelhub.seal(): plan.pack(...)",
}
_OPS = "kernelhub.ops."


def not_warmed(kind: str, what: str, caller: Caller) -> NotWarmed:
    """The error for work of this kind on behalf of `caller`."""
    if kind in _ADVICE:
        return NotWarmed(caller.op, kind, what, "", _ADVICE[kind].format(what=what, op=caller.op))
    line = line_for(caller)
    advice = f"Before kernelhub.seal(), add:\n    {line}{_warmup(caller)}{_nearest(caller)}"
    return NotWarmed(caller.op, kind, what, line, advice)


def line_for(caller: Caller) -> str:
    """Python that makes such a call once, on tensors of zeros."""
    function = HUB.function(caller.op)
    index = caller.bound.device if caller.bound is not None else _index_of(caller)
    device = device_of(index)
    forms = _forms(caller, function, device)
    names = [name for name in inspect.signature(function).parameters if name in forms]
    given = [f"{name}={_text(forms[name])}" for name in names]
    call = f"kernelhub.warm({', '.join([repr(caller.op), *given, f'device={str(device)!r}'])})"
    contexts = HUB.contexts.get()
    return f"with {', '.join(map(_context, contexts))}: {call}" if contexts else call


def _forms(caller: Caller, function: Any, device: torch.device) -> dict[str, Any]:
    """Forms of the arguments: those in the op's frame, or those of the running plan and of its preparation."""
    parameters = inspect.signature(function).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    frame: FrameType | None = caller.frame
    met: dict[str, Any] = {}
    while frame is not None:
        said = frame.f_locals
        if frame.f_code is inspect.unwrap(function).__code__ and not isinstance(said.get("backend"), DryRun):
            return _changed(written({name: said[name] for name in parameters}, device), defaults)
        if str(frame.f_globals.get("__name__", "")).startswith(_OPS):
            met = _tensors(frame, parameters)  # the outermost frame is the plan's; its arguments have the op's names
        frame = frame.f_back
    forms = dict(function.op.forms_of(caller.key, caller.bound))
    return _changed(forms | written(met if caller.bound is not None else {}, device), defaults)


def _tensors(frame: FrameType, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors that a plan's run and its step received, by the names of the op's parameters."""
    code, said = frame.f_code, frame.f_locals
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    step = said.get("step")
    of_step = {name: getattr(step, name, None) for name in parameters} if step is not None else {}
    found = {**of_step, **{name: said.get(name) for name in names if name in parameters}}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _changed(forms: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that differ from their defaults."""

    def same(value: Any, default: Any) -> bool:
        return value is default or (type(value) is type(default) and value == default)

    return {
        name: value for name, value in forms.items() if not same(value, defaults.get(name, inspect.Parameter.empty))
    }


def _text(value: Any) -> str:
    """The argument as source. A backend may be a list, which is equivalent to a tuple."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {_text(item)}" for name, item in value.items()) + "}"
    if type(value) in (list, tuple):
        inside = ", ".join(map(_text, value))
        return f"[{inside}]" if type(value) is list else f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return f"float('{value}')"
    return repr(value)


def _context(layer: Any) -> str:
    """The `kernelhub.use(...)` that is equivalent to a layer."""
    said: dict[str, Any] = {
        ("backend" if override.ops == "*" else override.ops): override.names for override in layer.requests
    }
    said |= {
        name: {override.ops: override.names for override in overrides}
        for name, overrides in (("prefer", layer.prefers), ("disable", layer.disables))
        if overrides
    }
    flags = ("deterministic", "batch_invariant", "strict", "unsafe", "trust")
    said |= {name: getattr(layer, name) for name in flags if getattr(layer, name) is not None}
    return f"kernelhub.use({', '.join(f'{name}={_text(value)}' for name, value in said.items())})"


def _index_of(caller: Caller) -> int:
    """Index of the device of a call during its selection: an argument on the stack of the dispatch."""
    frame: FrameType | None = caller.frame
    while frame is not None:
        index = frame.f_locals.get("device")
        if type(index) is int:
            return index
        frame = frame.f_back
    return -1


def _warmup(caller: Caller) -> str:
    """A note that a model's warm-up covers such calls, if a model may make them."""
    if caller.problem is None or not a_model_may_ask(HUB.function(caller.op).op.contract, caller.problem):
        return ""
    return "\nkernelhub.warmup(model, ...) covers it, if a listed model makes this call under the given settings."


def _nearest(caller: Caller) -> str:
    """How the call differs from the nearest call of its op that is ready."""
    ready = HUB.function(caller.op).op.ready()
    fields = [field.name for field in dataclasses.fields(caller.problem)]

    def differing(other: Any) -> list[str]:
        return [name for name in fields if getattr(other, name) != getattr(caller.problem, name)]

    if not ready:
        return "\nNo call of this op is ready."
    other = min(ready, key=lambda one: len(differing(one)))
    names = differing(other)
    if not names:
        return "\nThe same configuration is ready; its operands have another form (strides, alignment, sizes)."
    differences = ", ".join(f"{name}={getattr(caller.problem, name)} (ready: {getattr(other, name)})" for name in names)
    return f"\nThe nearest configuration that is ready differs in {differences}."
