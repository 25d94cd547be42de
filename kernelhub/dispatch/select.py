"""The choice: a pure function of problem, kernels, machine and policy.

Kernels are tried in the order in which they would run, and the first that nothing speaks against is chosen. The
`Selection` keeps the question, and tells what speaks against every other kernel once it is asked for that. `explain`
returns the same object by the same call, so the two cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from kernelhub.dispatch.candidates import Candidates
from kernelhub.dispatch.constraint import Rejection
from kernelhub.dispatch.kernel import Band, Kernel
from kernelhub.dispatch.lineup import lineup_of
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.order import Line
from kernelhub.dispatch.policy import Override, Policy
from kernelhub.dispatch.problem import ProblemT, Schema
from kernelhub.dispatch.reasons import Question, can_run, reasons
from kernelhub.dispatch.selection import Decision, Selection
from kernelhub.dispatch.standing import UNTRUSTED
from kernelhub.dispatch.tuned import TUNED, Tuned

_OF_BAND = {band: f"highest band: {band.name.lower()}" for band in Band}


def select(
    op: str,
    schema: Schema,
    problem: ProblemT,
    regime: str,
    candidates: Candidates,
    machine: Machine,
    policy: Policy,
) -> Selection[ProblemT]:
    """Choose a kernel; read nothing but the arguments.

    Args:
        op: name of the op.
        schema: its facets, for the features that the problem uses.
        problem: what is asked.
        regime: the op's name for the phase, by which order lines are found.
        candidates: the kernels there are, their order lines and known defects.
        machine: facts of the machine.
        policy: what the user said.
    """
    machine = machine.as_it_is()
    policy = policy.about(problem, machine)
    lineup = lineup_of(candidates, problem, machine)
    quarantined = machine.quarantined(problem.device)
    features = tuple(schema.features_used(problem))
    earned = machine.earned(problem.device)
    asked = Question(op, schema, problem, features, candidates, lineup, machine, quarantined, earned, policy)
    line, ranking = lineup.ranking(regime)
    tuned = machine.tuned(problem.device).find(op, problem)
    if tuned is not None:
        ranking = tuned.ranked(ranking)
    order = as_preferred(op, ranking, policy)
    chosen = None
    for kernel in order:
        if can_run(asked, kernel):
            chosen = kernel
            break
    request = policy.request_for(op)
    if request is not None:
        source, because = request.source, request.origin
    else:
        source, because = _soft_source(chosen, policy.preferences_for(op), tuned, line)
    tell = partial(_decisions, asked, ranking, chosen, because)
    if chosen is None:
        because = f"none of those asked for by {because} can run" if request else "none can run"
    overruled = _overruled(op, request, chosen, policy) if policy.fixes() else ()
    assumed = machine.assumed(problem.device)
    return Selection(op, problem, chosen, source, because, request is not None, overruled, tell, assumed)


def as_preferred(op: str, kernels: Sequence[Kernel], policy: Policy) -> Sequence[Kernel]:
    """Those of some ranked kernels that the user's words leave, in the order in which they are tried."""
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
    """Place of the kernel in an override; behind all of it if it is not meant."""
    return next((place for place, name in enumerate(override.names) if kernel.matches(name)), len(override.names))


def _soft_source(
    chosen: Kernel | None, overrides: Sequence[Override], tuned: Tuned | None, line: Line | None
) -> tuple[str, str]:
    """What decided without a request: the strongest override that names the winner, times, or the heuristic."""
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
    """An order line with its evidence; what is expected of its first kernel says nothing of another."""
    where = f"the order for {line.family}/{line.regime}"
    if not line.expected:
        return f"{where}: {line.evidence}"
    where = f"{where}, which is expected and not measured"
    return f"{where}: {line.evidence}" if chosen.name == line.kernels[0] else where


def _overruled(op: str, request: Override | None, chosen: Kernel | None, policy: Policy) -> tuple[str, ...]:
    """What named other kernels than the chosen one and was weaker: a lock or agreement, or what one of these beat."""
    if request is None or chosen is None:
        return ()
    weaker = [override for override in policy.requests if override.fixed and override is not request]
    if request.fixed:
        weaker += [override for override in (*policy.requests, *policy.preferences_for(op)) if not override.fixed]
    return tuple(
        f"{override.origin} names {' or '.join(override.names)}, but {request.origin} is stronger"
        for override in weaker
        if override.concerns(op) and not override.means(chosen)
    )


def _decisions(asked: Question, ranking: Sequence[Kernel], chosen: Kernel | None, because: str) -> tuple[Decision, ...]:
    """What is decided about every kernel, once one was chosen."""
    against = {kernel: tuple(dict.fromkeys(reasons(asked, kernel))) for kernel in asked.candidates.kernels}
    supported = [kernel for kernel in ranking if not against[kernel]]
    order = as_preferred(asked.op, supported, asked.policy)
    request = asked.policy.request_for(asked.op)
    result = []
    if chosen is not None:
        result.append(Decision(chosen.name, True, "selected", because))
        result += [
            Decision(kernel.name, True, "supported", f"supported, ranked below {order[index].name}")
            for index, kernel in enumerate(order[1:])
        ]
    faster = _distrusted_before(asked, ranking, against, chosen)
    requested = [] if request is None else _in_order_of(asked.candidates.kernels, request.names)
    result += [_rejected(kernel, against[kernel], kernel in faster) for kernel in requested if against[kernel]]
    for kernel in supported:
        if kernel not in order and request is not None:
            reason = f"supported, but {request.origin} asks for {' or '.join(request.names)}"
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
    asked: Question, ranking: Sequence[Kernel], against: Mapping[Kernel, Sequence[Rejection]], chosen: Kernel | None
) -> list[Kernel]:
    """Kernels that only trust keeps from being chosen in place of the one that is, best first."""
    result: list[Kernel] = []
    for kernel in as_preferred(asked.op, ranking, asked.policy):
        if kernel is chosen:
            break
        if [rejection.code for rejection in against[kernel]] == [UNTRUSTED]:
            result.append(kernel)
    return result
