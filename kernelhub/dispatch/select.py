"""The choice: a pure function of problem, kernels, machine and policy.

`select` returns a `Selection` with one decision for every registered kernel of the op. `explain`
returns the same object by the same call, so the two cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple

from kernelhub.dispatch.constraint import NOT_BUILT, Anything, Constraint, Rejection
from kernelhub.dispatch.kernel import Kernel, KnownBad
from kernelhub.dispatch.machine import QUARANTINED, Machine
from kernelhub.dispatch.order import Line, line_for, ranked
from kernelhub.dispatch.policy import Policy, Wish
from kernelhub.dispatch.problem import CHECKPOINT, WEIGHT_LAYOUT, ProblemT, Schema, as_dict
from kernelhub.dispatch.tuned import TUNED, Tuned

_DEVICE = frozenset({"device"})
OF_DEVICES = ("vendor", "capability")  # codes of what speaks against a device, whatever the problem


class Decision(NamedTuple):
    """What was decided about one kernel.

    Attributes:
        kernel: its name.
        accepted: whether it could run this problem under this policy.
        code: ``"selected"``, ``"outranked"``, or the stable code of the first rejection.
        reason: a sentence.
        remedy: what would change the decision; empty if nothing would here.
        rejections: every reason against it, the first of which gave `code`.
    """

    kernel: str
    accepted: bool
    code: str
    reason: str
    remedy: str = ""
    rejections: tuple[Rejection, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = {
            "kernel": self.kernel,
            "accepted": self.accepted,
            "code": self.code,
            "reason": self.reason,
            "remedy": self.remedy,
        }
        if len(self.rejections) > 1:
            plain["also"] = [
                {"code": item.code, "reason": item.reason, "remedy": item.remedy} for item in self.rejections[1:]
            ]
        return plain


@dataclass(frozen=True)
class Selection(Generic[ProblemT]):
    """The answer for one problem.

    Attributes:
        op: name of the op.
        problem: what was looked at.
        kernel: the record of the chosen kernel, or None if none may run.
        source: who decided, a stable word: ``"force"``, ``"kwarg"``, ``"context"``, ``"configure"``, ``"ranks"`` (what
            ranks agreed on), ``"lock"`` (a lock file), ``"environment"``, ``"file"``, ``"engine"`` (a variable of
            another project), ``"tuned"`` (measured: `kernelhub.tune`), ``"order"`` (a line of the heuristic),
            ``"band"`` (no line).
        because: the same as a sentence, with its evidence.
        decisions: one for every registered kernel of the op: the chosen one first, then those that were
            outranked, best first, then the rejected by name.
        explicit: whether the user asked for it by name; such a choice is never replaced.
        overruled: what was said for other kernels and gave way, as sentences.
    """

    op: str
    problem: ProblemT
    kernel: Kernel | None
    source: str
    because: str
    decisions: tuple[Decision, ...]
    explicit: bool
    overruled: tuple[str, ...] = ()

    @property
    def selected(self) -> str | None:
        """Name of the chosen kernel."""
        return self.kernel.name if self.kernel else None

    @property
    def weights(self) -> str | None:
        """How the chosen kernel takes the op's weights, as a sentence; None if the op takes no packed ones."""
        given = getattr(self.problem, WEIGHT_LAYOUT, None)
        if given is None or self.kernel is None:
            return None
        reads = f"weights: given as {given}; {self.kernel.name} reads {' or '.join(self.kernel.layouts)}"
        if not self.kernel.packs_to:
            return f"{reads}, and packs nothing"
        need = "and needs that" if self.kernel.needs_packing else "which is not needed"
        return f"{reads}, and packs to {self.kernel.packs_to}, {need}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the keys ``op``, ``problem``, ``selected``, ``source``, ``decisions``."""
        weights: dict[str, Any] = {}
        if self.kernel is not None and hasattr(self.problem, WEIGHT_LAYOUT):
            weights["weights"] = {
                "layout": getattr(self.problem, WEIGHT_LAYOUT),
                "reads": list(self.kernel.layouts),
                "packs_to": self.kernel.packs_to or None,
                "needs_packing": self.kernel.needs_packing,
            }
        return {
            "op": self.op,
            "problem": as_dict(self.problem),
            "selected": self.selected,
            "source": self.source,
            "because": self.because,
            **({"overruled": list(self.overruled)} if self.overruled else {}),
            **weights,
            "decisions": [decision.to_dict() for decision in self.decisions],
        }

    def __str__(self) -> str:
        who = f"{self.selected}, decided by {self.source}" if self.selected else f"no kernel: {self.because}"
        lines = [f"{self.op} on {self.problem.device}: {who}", *([f"  {self.weights}"] if self.weights else [])]
        lines += [f"  {sentence}" for sentence in self.overruled]
        width = max((len(decision.kernel) for decision in self.decisions), default=0)
        for decision in self.decisions:
            mark = "*" if decision.code == "selected" else "+" if decision.accepted else "-"
            lines.append(f"  {mark} {decision.kernel:<{width}}  {decision.code}: {decision.reason}")
            if decision.remedy and not decision.accepted:
                lines.append(f"    {'':<{width}}  remedy: {decision.remedy}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Candidates:
    """What is registered for one op, as the selector sees it.

    Attributes:
        kernels: all records of the op; they are kept by name.
        lines: the op's heuristic.
        known_bad: entries that speak of any of the kernels.
    """

    kernels: tuple[Kernel, ...]
    lines: tuple[Line, ...] = ()
    known_bad: tuple[KnownBad, ...] = ()
    _about: dict[Kernel, tuple[KnownBad, ...]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernels", tuple(sorted(self.kernels, key=lambda kernel: kernel.name)))

    def known_bad_of(self, kernel: Kernel) -> tuple[KnownBad, ...]:
        """The entries that speak of a kernel, looked for once."""
        found = self._about.get(kernel)
        if found is None:
            found = tuple(e for e in self.known_bad if e.op in ("*", kernel.op) and kernel.matches(e.kernel))
            self._about[kernel] = found
        return found


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
    policy = policy.about(problem, machine)
    features = schema.features_used(problem)
    line = line_for(candidates.lines, problem.device, regime)
    request = policy.request_for(op)
    kept = machine.on(problem.device)
    quarantined = kept.get(QUARANTINED)
    if quarantined is None:
        quarantined = machine.quarantined(problem.device)
    rejections = {}
    # Where the user named no kernel and nothing is fixed, only these two of the policy speak against one.
    flags = (policy.deterministic, policy.batch_invariant)
    silent = policy.names_none and not machine.load_failures
    for kernel in candidates.kernels:
        standing = kept.get(kernel)
        if standing is None:
            standing = kept[kernel] = _standing(kernel, problem, machine)
        known_bad = candidates.known_bad_of(kernel)
        if standing.elsewhere and silent and not known_bad:
            # Of a kernel for other devices nothing is asked but which features are used.
            key = (*features, *flags)
            known = standing.said.get(key)
            if known is None:
                known = _rejections(op, kernel, standing, problem, features, known_bad, machine, policy)
                standing.said[key] = known
            rejections[kernel.name] = known
            continue
        rejections[kernel.name] = _rejections(op, kernel, standing, problem, features, known_bad, machine, policy)
    if quarantined:
        for kernel in candidates.kernels:
            verdict = quarantined.get((op, kernel.name))
            if verdict is not None and not (policy.unsafe and _asked_for(op, kernel, policy)):
                rejections[kernel.name] += (verdict,)
    layout = getattr(problem, WEIGHT_LAYOUT, CHECKPOINT)
    for kernel in candidates.kernels:
        if layout not in kernel.layouts and not (policy.unsafe and _asked_for(op, kernel, policy)):
            rejections[kernel.name] += (_layout_rejection(kernel, layout, candidates.kernels),)
    able = [kernel for kernel in ranked(candidates.kernels, line) if not rejections[kernel.name]]
    tuned = machine.tuned(problem.device).find(op, problem)
    if tuned is not None:
        able = tuned.ranked(able)
    order = as_wished(op, able, policy)
    if request is not None:
        source, because = request.source, request.origin
    else:
        source, because = _soft_source(order, _preferences(op, policy), line, tuned)
    chosen = order[0] if order else None
    decisions = _decisions(candidates.kernels, chosen, order, able, rejections, because, request)
    if chosen is None:
        because = f"none of those asked for by {because} can run" if request else "none can run"
    overruled = _overruled(op, request, chosen, policy) if policy.fixes() else ()
    return Selection(op, problem, chosen, source, because, decisions, request is not None, overruled)


def as_wished(op: str, kernels: Sequence[Kernel], policy: Policy) -> list[Kernel]:
    """Those of some ranked kernels that the user's words leave, in the order in which they are tried."""
    request = policy.request_for(op)
    if request is not None:
        return _in_order_of(kernels, request.names)
    wishes = _preferences(op, policy)
    return sorted(kernels, key=lambda kernel: [_position(wish, kernel) for wish in wishes])


def _layout_rejection(kernel: Kernel, layout: str, kernels: Sequence[Kernel]) -> Rejection:
    """Why a kernel cannot read these weights, and who can."""
    reason = f"reads weights as {' or '.join(kernel.layouts)}; these are {layout}"
    if layout == CHECKPOINT:
        return Rejection(
            "layout", reason, f"pack them as {kernel.packs_to or kernel.layouts[0]}: prepare(...).pack(...)"
        )
    readers = [other.name for other in kernels if layout in other.layouts]
    unpack = "give them as in the checkpoint, which PackedWeight.unpack() gives back"
    return Rejection("layout", reason, f"run {' or '.join(readers)}, or {unpack}" if readers else unpack)


class _Standing(NamedTuple):
    """What of a record's constraints stands for every problem on a device of a machine.

    Attributes:
        rejections: of those that read nothing but the device, each with its place among the constraints.
        rest: what the other constraints say of a problem, likewise; of a kernel for other devices, none.
        elsewhere: whether the kernel is for other devices.
        said: all that was said of such a kernel, by the features that were used.
    """

    rejections: tuple[tuple[int, Rejection], ...]
    rest: tuple[tuple[int, Callable[[Any, Machine], Rejection | None]], ...]
    elsewhere: bool
    said: dict[tuple[Any, ...], tuple[Rejection, ...]]


def _standing(kernel: Kernel, problem: Any, machine: Machine) -> _Standing:
    numbered = tuple((place, one) for place, one in enumerate(kernel.constraints) if not isinstance(one, Anything))
    asked = ((place, _rejection(one, problem, machine)) for place, one in numbered if set(one.fields) <= _DEVICE)
    first: dict[Rejection, int] = {}  # what several probes say of a library that is missing is said once
    for place, one in asked:
        if one is not None:
            first.setdefault(one, place)
    found = tuple((place, one) for one, place in first.items())
    if any(one.code in OF_DEVICES for _, one in found):
        return _Standing(found, (), True, {})
    rest = tuple((place, one.reject) for place, one in numbered if not set(one.fields) <= _DEVICE)
    return _Standing(found, rest, False, {})


def _rejection(constraint: Constraint, problem: Any, machine: Machine) -> Rejection | None:
    try:
        return constraint.reject(problem, machine)
    except Exception as error:  # a foreign constraint must not take the call down
        return Rejection("constraint_error", f"{constraint!r} raised {error!r}")


def _rejections(
    op: str,
    kernel: Kernel,
    standing: _Standing,
    problem: Any,
    features: Sequence[str],
    known_bad: Sequence[KnownBad],
    machine: Machine,
    policy: Policy,
) -> tuple[Rejection, ...]:
    """Every reason against one kernel, but that one for other devices is not asked about the problem."""
    found: list[Rejection] = []
    if policy.disables:
        found = [
            Rejection("disabled", f"disabled by {wish.origin}", wish.undo or f"remove it from {wish.origin}")
            for wish in policy.removing(op, kernel)
        ]
    if policy.barred:
        found += [*policy.barred.get("*", ()), *policy.barred.get(kernel.name, ())]
    if policy.unsafe and _asked_for(op, kernel, policy):
        failure = machine.load_failures.get((op, kernel.name))  # what cannot be loaded cannot be run past anything
        return tuple(found) if failure is None else (*found, failure)
    against = []
    try:
        for place, reject in standing.rest:
            rejection = reject(problem, machine)
            if rejection is not None:
                against.append((place, rejection))
    except Exception:  # one that is foreign raised: it is told apart from the others
        told = [(place, _rejection(kernel.constraints[place], problem, machine)) for place, _ in standing.rest]
        against = [(place, rejection) for place, rejection in told if rejection is not None]
    if against:
        found += [rejection for _, rejection in sorted((*standing.rejections, *against), key=_place)]
    elif standing.rejections:
        found += [rejection for _, rejection in standing.rejections]
    for rejection in found:
        if rejection.code == NOT_BUILT:
            if _named(op, kernel, policy):
                found = [other for other in found if other.code != NOT_BUILT]
            break
    for name in features:
        if name not in kernel.features:
            found.append(Rejection("feature", f"does not support {name}"))
    if machine.load_failures:
        failure = machine.load_failures.get((op, kernel.name))
        if failure is not None:
            found.append(failure)
    if policy.deterministic and not kernel.deterministic:
        found.append(Rejection("nondeterministic", "may give other bits from run to run"))
    if policy.batch_invariant and not kernel.batch_invariant:
        found.append(Rejection("batch_variant", "a row's bits may depend on the rest of the batch"))
    for entry in known_bad:
        if all(condition.reject(problem, machine) is None for condition in entry.where):
            found.append(Rejection("known_bad", f"{entry.symptom} ({entry.issue})", entry.remedy))
    return tuple(found)


def _place(numbered: tuple[int, Rejection]) -> int:
    return numbered[0]


def _asked_for(op: str, kernel: Kernel, policy: Policy) -> bool:
    request = policy.request_for(op)
    return request is not None and not request.fixed and request.means(kernel)


def _named(op: str, kernel: Kernel, policy: Policy) -> bool:
    """Whether the user asks for the kernel or prefers it, by its name or its backend's."""
    wishes = _preferences(op, policy)
    return _asked_for(op, kernel, policy) or any(_position(wish, kernel) < len(wish.names) for wish in wishes)


def _in_order_of(kernels: Sequence[Kernel], names: Sequence[str]) -> list[Kernel]:
    """The kernels that the names mean: in the order of the names, then as ranked."""
    result: list[Kernel] = []
    for name in names:
        result += [kernel for kernel in kernels if kernel.matches(name) and kernel not in result]
    return result


def _preferences(op: str, policy: Policy) -> list[Wish]:
    return [wish for wish in policy.prefers if wish.concerns(op)]


def _position(wish: Wish, kernel: Kernel) -> int:
    """Place of the kernel in a wish; behind all of it if it is not meant."""
    return next((place for place, name in enumerate(wish.names) if kernel.matches(name)), len(wish.names))


def _soft_source(
    order: Sequence[Kernel], wishes: Sequence[Wish], line: Line | None, tuned: Tuned | None
) -> tuple[str, str]:
    """Who decided when nothing explicit was said: the strongest wish that means the winner, times, or the heuristic."""
    if not order:
        return "band", "no kernel can run"
    wish = next((wish for wish in wishes if _position(wish, order[0]) < len(wish.names)), None)
    if wish is not None:
        return wish.source, f"preferred by {wish.origin}"
    if tuned is not None and order[0].name in tuned.because:
        return TUNED, tuned.because[order[0].name]
    if line is not None and order[0].name in line.kernels:
        return "order", f"first able in the order for {line.family}/{line.regime}: {line.evidence}"
    return "band", f"highest band: {order[0].band.name.lower()}"


def _overruled(op: str, request: Wish | None, chosen: Kernel | None, policy: Policy) -> tuple[str, ...]:
    """What named other kernels than the chosen one and was weaker: a lock or agreement, or what one of these beat."""
    if request is None or chosen is None:
        return ()
    weaker = [wish for wish in policy.requests if wish.fixed and wish is not request]
    if request.fixed:
        weaker += [wish for wish in (*policy.requests, *_preferences(op, policy)) if not wish.fixed]
    return tuple(
        f"{wish.origin} names {' or '.join(wish.names)}, but {request.origin} is stronger"
        for wish in weaker
        if wish.concerns(op) and not wish.means(chosen)
    )


def _decisions(
    kernels: Sequence[Kernel],
    chosen: Kernel | None,
    order: Sequence[Kernel],
    able: Sequence[Kernel],
    rejections: dict[str, tuple[Rejection, ...]],
    because: str,
    request: Wish | None,
) -> tuple[Decision, ...]:
    result = []
    if chosen is not None:
        result.append(Decision(chosen.name, True, "selected", because))
        result += [
            Decision(kernel.name, True, "outranked", f"able, ranked after {order[index].name}")
            for index, kernel in enumerate(order[1:])
        ]
    for kernel in able:
        if kernel not in order and request is not None:
            reason = f"able, but {request.origin} asks for {' or '.join(request.names)}"
            undo = request.undo or f"remove {request.origin}"
            result.append(Decision(kernel.name, False, "not_requested", reason, undo))
    for kernel in kernels:
        reasons = rejections[kernel.name]
        if reasons:
            first = reasons[0]
            result.append(Decision(kernel.name, False, first.code, first.reason, first.remedy, reasons))
    return tuple(result)
