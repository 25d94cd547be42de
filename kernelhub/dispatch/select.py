"""The selection: a pure function of problem, kernels, machine and policy.

Kernels are tried in the order of their ranking, and the first without a reason against it is selected. The `Selection`
keeps its inputs, and evaluates the reasons against every other kernel when they are first read. `explain` returns the
same object by the same call, so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from kernelhub.dispatch.constraint import Rejection
from kernelhub.dispatch.kernel import Band, Kernel, means
from kernelhub.dispatch.load import LoadFailure
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.order import Candidates, Line
from kernelhub.dispatch.policy import LOCK, Override, Policy
from kernelhub.dispatch.problem import ProblemT, Schema
from kernelhub.dispatch.reasons import Inputs, can_run, kernels_on, reasons
from kernelhub.dispatch.selection import Decision, Selection
from kernelhub.dispatch.standing import UNTRUSTED
from kernelhub.dispatch.tuned import TUNED, Tuned
from kernelhub.errors import KernelUnavailable, NoKernel

_OF_BAND = {band: f"highest band: {band.name.lower()}" for band in Band}


def select(
    op: str,
    schema: Schema,
    problem: ProblemT,
    regime: str,
    candidates: Candidates,
    machine: Machine,
    policy: Policy,
    parts: Mapping[Kernel, tuple[Selection[Any], ...]] = MappingProxyType({}),
) -> Selection[ProblemT]:
    """Select a kernel for a problem. The result depends on the arguments alone.

    Args:
        op: name of the op.
        schema: the op's facets, for the features that the problem needs.
        problem: the problem.
        regime: the problem's regime, which selects the order line.
        candidates: the registered kernels, their order lines and known defects.
        machine: facts of the machine.
        policy: the policy for the op.
        parts: for each kernel that is made of other ops, their selections for this problem.
    """
    machine = machine.snapshot()
    policy = policy.about(problem, machine)
    on_device = kernels_on(candidates, problem, machine)
    quarantined = machine.quarantined(problem.device)
    features = tuple(schema.features_used(problem))
    earned = machine.earned(problem.device)
    inputs = Inputs(op, schema, problem, features, candidates, on_device, machine, quarantined, earned, policy, parts)
    line, ranking = on_device.ranking(regime)
    tuned = machine.tuned(problem.device).find(op, problem)
    if tuned is not None:
        ranking = tuned.ranked(ranking)
    order = as_preferred(op, ranking, policy)
    chosen = None
    for kernel in order:
        if can_run(inputs, kernel):
            chosen = kernel
            break
    request = policy.request_for(op)
    if request is not None:
        source, because = request.source, request.origin
    else:
        source, because = _soft_source(chosen, policy.preferences_for(op), tuned, line)
    decide = _Decide(inputs, ranking, chosen, because)
    if chosen is None:
        because = f"none of the kernels requested by {because} is supported" if request else "none is supported"
    overruled = _overruled(op, request, chosen, policy) if policy.has_pinned() else ()
    assumed = machine.assumed(problem.device)
    made_of = () if chosen is None else parts.get(chosen, ())
    return Selection(op, problem, chosen, source, because, request is not None, overruled, decide, assumed, made_of)


def as_preferred(op: str, kernels: Sequence[Kernel], policy: Policy) -> Sequence[Kernel]:
    """The ranked kernels that requests leave, in the order in which they are tried."""
    request = policy.request_for(op)
    if request is not None:
        return _in_order_of(kernels, request.names)
    overrides = policy.preferences_for(op)
    if not overrides:
        return kernels
    return sorted(kernels, key=lambda kernel: [_position(override, kernel) for override in overrides])


def _in_order_of(kernels: Sequence[Kernel], names: Sequence[str]) -> list[Kernel]:
    """The kernels that the names mean: in the order of the names, then as ranked."""
    result: list[Kernel] = []
    for name in names:
        result += [kernel for kernel in kernels if kernel.matches(name) and kernel not in result]
    return result


def _position(override: Override, kernel: Kernel) -> int:
    """Position of the kernel in an override; after the last name if the override does not name it."""
    return next((place for place, name in enumerate(override.names) if kernel.matches(name)), len(override.names))


def _soft_source(
    chosen: Kernel | None, overrides: Sequence[Override], tuned: Tuned | None, line: Line | None
) -> tuple[str, str]:
    """Source and reason without a request: the strongest preference for the kernel, measured times, or the order."""
    if chosen is None:
        return "band", "no kernel can run"
    override = next((override for override in overrides if override.means(chosen)), None) if overrides else None
    if override is not None:
        return override.source, f"preferred by {override.origin}"
    if tuned is not None and chosen.name in tuned.because:
        return TUNED, tuned.because[chosen.name]
    if line is not None and chosen.name in line.kernels:
        return "order", f"fastest supported kernel in {_order_of(line, chosen)}"
    return "band", _OF_BAND[chosen.band]


def _order_of(line: Line, chosen: Kernel) -> str:
    """An order line with its evidence; an expectation about its first kernel is not repeated for another."""
    where = f"the order for {line.family}/{line.regime}"
    if not line.expected:
        return f"{where}: {line.evidence}"
    where = f"{where}, which is expected and not measured"
    return f"{where}: {line.evidence}" if chosen.name == line.kernels[0] else where


def _overruled(op: str, request: Override | None, chosen: Kernel | None, policy: Policy) -> tuple[str, ...]:
    """Weaker requests for other kernels: of a lock file or an agreement, or those that one of these overrules."""
    if request is None or chosen is None:
        return ()
    weaker = [override for override in policy.requests if override.pinned and override is not request]
    if request.pinned:
        weaker += [override for override in (*policy.requests, *policy.preferences_for(op)) if not override.pinned]
    return tuple(
        f"{override.origin} names {' or '.join(override.names)}, but {request.origin} is stronger"
        for override in weaker
        if override.concerns(op) and not override.means(chosen)
    )


class _Decide(NamedTuple):
    """A `Selection.decide` that evaluates the reasons against kernels when it is asked."""

    inputs: Inputs
    ranking: Sequence[Kernel]
    chosen: Kernel | None
    because: str

    def __call__(self) -> tuple[Decision, ...]:
        return _decisions(*self)

    def against(self, name: str) -> tuple[Rejection, ...]:
        kernel = next(kernel for kernel in self.inputs.candidates.kernels if kernel.name == name)
        return tuple(dict.fromkeys(reasons(self.inputs, kernel)))


def _decisions(inputs: Inputs, ranking: Sequence[Kernel], chosen: Kernel | None, because: str) -> tuple[Decision, ...]:
    """The decision about every kernel, after one was selected."""
    against = {kernel: tuple(dict.fromkeys(reasons(inputs, kernel))) for kernel in inputs.candidates.kernels}
    supported = [kernel for kernel in ranking if not against[kernel]]
    order = as_preferred(inputs.op, supported, inputs.policy)
    request = inputs.policy.request_for(inputs.op)
    result = []
    if chosen is not None:
        result.append(Decision(chosen.name, True, "selected", because))
        result += [
            Decision(kernel.name, True, "supported", f"supported, ranked below {order[index].name}")
            for index, kernel in enumerate(order[1:])
        ]
    faster = _distrusted_before(inputs, ranking, against, chosen)
    requested = [] if request is None else _in_order_of(inputs.candidates.kernels, request.names)
    result += [_rejected(kernel, against[kernel], kernel in faster) for kernel in requested if against[kernel]]
    for kernel in supported:
        if kernel not in order and request is not None:
            reason = f"supported, but {request.origin} requests {' or '.join(request.names)}"
            undo = request.undo or f"remove {request.origin}"
            result.append(Decision(kernel.name, False, "not_requested", reason, undo))
    others = (*faster, *(kernel for kernel in against if kernel not in faster))
    result += [
        _rejected(kernel, against[kernel], kernel in faster)
        for kernel in others
        if against[kernel] and kernel not in requested
    ]
    return tuple(result)


def _rejected(kernel: Kernel, rejections: tuple[Rejection, ...], ahead: bool) -> Decision:
    first = rejections[0]
    reason = f"would be first; {first.reason}" if ahead else first.reason
    return Decision(kernel.name, False, first.code, reason, first.remedy, rejections, ahead)


def _distrusted_before(
    inputs: Inputs, ranking: Sequence[Kernel], against: Mapping[Kernel, Sequence[Rejection]], chosen: Kernel | None
) -> list[Kernel]:
    """Kernels that would be selected instead if the policy of trust accepted them, best first."""
    result: list[Kernel] = []
    for kernel in as_preferred(inputs.op, ranking, inputs.policy):
        if kernel is chosen:
            break
        if [rejection.code for rejection in against[kernel]] == [UNTRUSTED]:
            result.append(kernel)
    return result


def no_kernel(selection: Selection[Any], policy: Policy) -> NoKernel:
    """The error of a selection that found no kernel.

    Args:
        selection: the selection.
        policy: the policy for its problem.
    """
    return NoKernel(_no_kernel_message(selection, policy), selection)


def unavailable(selection: Selection[Any], failure: LoadFailure, strict: bool) -> KernelUnavailable:
    """The error of a selected kernel that cannot be loaded while `strict` is on or kernelhub is sealed."""
    why = "strict is on" if strict else "kernelhub is sealed"
    return KernelUnavailable(
        f"{selection.op}: {selection.selected} was selected ({selection.because}) but {failure.reason}, and {why}; "
        f"{failure.remedy}"
    )


def _no_kernel_message(selection: Selection[Any], policy: Policy) -> str:
    request = policy.request_for(selection.op)
    if request is None:
        return f"{selection.op}: no registered kernel can run this."
    if request.source == LOCK and not any(item.kernel in request.names for item in selection.decisions):
        return (
            f"{selection.op}: {request.origin} pins {request.names[0]}, and no kernel of that name is registered in "
            f"this version. To undo this, {request.undo}."
        )
    names = " or ".join(request.names)
    if not any(means(name, item.kernel) for item in selection.decisions for name in request.names):
        message = f"{selection.op}: {request.origin} requests {names}, and no kernel of {selection.op} has that name."
    else:
        message = f"{selection.op}: {request.origin} requests {names}, which cannot run this."
    return f"{message} To undo this, {request.undo}." if request.undo else message
