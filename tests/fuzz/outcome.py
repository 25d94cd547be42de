"""What became of a call: right, refused by name, or a failure in words."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.hub import HUB
from kernelhub.errors import DeviceLost, InvalidArgument, KernelUnavailable, NoKernel
from kernelhub.evidence.cases import CASES
from kernelhub.evidence.poison import kind_of_error, untouched
from kernelhub.ops.arguments import describe
from kernelhub.ops.case import bytes_of
from kernelhub.runtime.scratch import watched
from tests.fuzz.bases import DEFAULT
from tests.fuzz.memory import Placed
from tests.fuzz.operands import Arguments, parameter_of, tensors_of

PASSED, REFUSED, FAILED, SKIPPED, BROKEN = "passed", "refused", "failed", "skipped", "broken"


@dataclass
class ParsedCall:
    """A call that is ready to be made.

    Attributes:
        judged: what its results are judged by: the same values in ordinary memory.
        given: what it is called with.
        places: its destinations, by parameter.
        operands: operands in watched memory.
        varied: parameters that may be named by a refusal.
        note: what is unusual about it.
        within: what is entered around the call.
        written: parameters that the call may write to besides those that the op writes.
        must_refuse: that no result is right.
        partners: a refusal may name another parameter, if what is varied contradicts it or it speaks of it.
        before: arguments of a right call that is made first.
        cold: everything that was decided is forgotten first.
        around: tensors around which nothing may be written.
        call: what is called in place of the op, with `given` and the destinations.
    """

    judged: Arguments
    given: Arguments
    places: dict[str, Placed] = field(default_factory=dict)
    operands: list[Placed] = field(default_factory=list)
    varied: tuple[str, ...] = ()
    note: str = ""
    within: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    written: tuple[str, ...] = ()
    must_refuse: bool = False
    call: Callable[..., Any] | None = None
    partners: bool = False
    before: Arguments | None = None
    cold: bool = False
    around: list[Placed] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """What became of it.

    Attributes:
        kind: `PASSED`, `REFUSED`, `FAILED`, `SKIPPED`, or `BROKEN`: it could not be judged.
        text: what is wrong, on one line.
        error: what was raised.
    """

    kind: str
    text: str = ""
    error: Exception | None = None


class LostDevice(Exception):
    """Nothing can be run after this."""


def lost(error: Exception) -> bool:
    """Whether an error says that the device is of no more use to this process."""
    return isinstance(error, DeviceLost) or type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)


def outcome_of(op: str, kernel: str, asked: ParsedCall, device: torch.device) -> Outcome:
    """Make the call, and say what became of it."""
    cases = CASES[op]
    before = _values(asked.given)
    function = asked.call or HUB.function(op)
    how = {} if kernel == DEFAULT or asked.call else {"backend": kernel}
    destinations = {name: place.tensor for name, place in asked.places.items()}
    if asked.cold:
        HUB.function(op).op._forget()
    if asked.before is not None:
        function(**asked.before, **how)
    try:
        with watched() as workspaces, asked.within():
            returned = function(**asked.given, **destinations, **how)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    except Exception as error:
        return _raised(error, asked)
    for guard in workspaces:
        if guard.trespassed():
            return Outcome(FAILED, f"{guard.trespassed()} bytes around workspace {guard.tag!r} were changed")
    if any(place.trespassed() for place in asked.around):
        return Outcome(FAILED, "bytes around what it was given were changed")
    for name, place in asked.places.items():
        if place.trespassed():
            return Outcome(FAILED, f"{place.trespassed()} bytes around {name} were changed")
    if any(operand.changed() for operand in asked.operands):
        return Outcome(FAILED, "bytes of an operand or around it were changed")
    if asked.must_refuse:
        return Outcome(FAILED, "accepted, and no result of it can be right")
    written = {*cases.written, *asked.written}
    after = _values(asked.given)
    spoiled = [name for name in before if parameter_of(name) not in written and not before[name].equal(after[name])]
    if spoiled:
        return Outcome(FAILED, f"{' and '.join(spoiled)} is not as it was before the call")
    if not asked.places:
        names = list(cases.destinations(asked.judged))
        destinations = cases.returned_for(names, returned)
    else:
        for name, rows in cases.untouched(asked.judged).items():
            if name in destinations and not bool(untouched(destinations[name])[rows].all()):
                return Outcome(FAILED, f"rows of {name} that belong to no sequence were written")
    try:
        results = cases.results(returned, destinations, asked.given)
        shapes = cases.destinations(asked.judged)
    except Exception:
        if asked.partners:
            return Outcome(FAILED, "accepted, and the reference takes no such call")
        raise
    for name, (shape, dtype) in shapes.items():
        if name in results and (tuple(results[name].shape) != shape or results[name].dtype is not dtype):
            return Outcome(FAILED, f"{name} is {describe(results[name])}, not {dtype} {list(shape)}")
    results = {name: tensor.resolve_neg() for name, tensor in results.items()}
    try:
        judgement = cases.judge(results, asked.judged)
    except Exception as error:
        if asked.partners:
            return Outcome(
                FAILED, f"accepted, and the reference takes no such call: {type(error).__name__}: {error}"[:200]
            )
        raise
    if judgement.ok:
        return Outcome(PASSED)
    return Outcome(FAILED, f"{kind_of_error(results, judgement)}: {judgement.figures}")


def _values(arguments: Arguments) -> dict[str, Tensor]:
    """A copy of the bytes of every tensor's values."""
    return {
        name: bytes_of(tensor.detach().resolve_neg()).clone()
        for name, tensor in tensors_of(arguments).items()
        if tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
    }


def _raised(error: Exception, asked: ParsedCall) -> Outcome:
    first = (str(error).strip().splitlines() or [""])[0][:260]
    if isinstance(error, InvalidArgument):
        named = parameter_of(error.parameter)
        varied = {parameter_of(name) for name in asked.varied}
        spoken_of = any(re.search(rf"\b{name}\b", str(error)) for name in varied)
        if named in varied or (asked.partners and (spoken_of or not asked.must_refuse)):
            return Outcome(REFUSED, first, error)
        if asked.partners:
            return Outcome(FAILED, f"names {error.parameter} and not what is wrong: {first}", error)
        return Outcome(FAILED, f"refuses {error.parameter}, which is right: {first}", error)
    if isinstance(error, NoKernel | KernelUnavailable):
        return Outcome(REFUSED, first, error)
    if isinstance(error, torch.OutOfMemoryError):
        return Outcome(SKIPPED, "no memory", error)
    text = f"{type(error).__name__}: {first}"
    if lost(error):
        raise LostDevice(text) from error
    return Outcome(FAILED, text, error)
