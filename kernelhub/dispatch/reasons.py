"""The reasons against a kernel, evaluated lazily, so that selection stops at the first.

Many reasons do not depend on the problem: the kernel is for other devices, or its library is not installed.
`DeviceKernels` evaluates those once for each device. `Inputs` stores everything else that a selection depends on, as it
was at that time, so that a later explanation gives the same reasons.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kernelhub.dispatch.constraint import NOT_BUILT, Anything, Constraint, OneOf, Rejection
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.order import Candidates, Line, line_for, ranked
from kernelhub.dispatch.policy import Policy
from kernelhub.dispatch.problem import CHECKPOINT, WEIGHT_LAYOUT, Schema, flag_of
from kernelhub.dispatch.problem_class import unpacked_facets
from kernelhub.dispatch.selection import Selection
from kernelhub.dispatch.standing import (
    ANY,
    KNOWN_BAD,
    MEASURED,
    OPT_IN,
    PUBLISHED,
    UNTRUSTED,
    VENDOR,
    VERIFIED,
    Standing,
)

OF_DEVICES = ("vendor", "capability")  # codes of rejections of a device, for every problem
_MISSING = object()
CONSTRAINT_ERROR = "constraint_error"  # code of a constraint that raises, or returns no Rejection
_DEVICE = frozenset({"device"})
_PLAIN = (str, int, bool, float, type(None))  # comparing one with a facet does not raise
_FIX = "fix the backend that the kernel is from, or disable it"


class OnDevice(NamedTuple):
    """A record's constraints, evaluated for one device as far as they do not depend on the problem.

    Attributes:
        parts: in the order of the constraints: rejections of those that read the device alone, and the constraints
            that still need the problem. A kernel for other devices has no constraints here.
        refused: whether a rejection in `parts` applies even if a user requests the kernel.
        one_of: facets with the values that constraints in `parts` allow, of which one reason is enough that nobody
            reads.
        standing: of the kernel on the device's family.
    """

    parts: tuple[Rejection | Constraint, ...]
    refused: bool
    one_of: tuple[tuple[str, tuple[Any, ...]], ...]
    standing: Standing


class DeviceKernels:
    """An op's kernels on one device of a machine.

    Attributes:
        by_kernel: each kernel's constraints, evaluated for the device.
    """

    def __init__(self, candidates: Candidates, problem: Any, machine: Machine) -> None:
        self.by_kernel = {kernel: _on_device(kernel, problem, machine) for kernel in candidates.kernels}
        self._candidates = candidates
        self._device = problem.device
        self._rankings: dict[str, tuple[Line | None, tuple[Kernel, ...]]] = {}

    def ranking(self, regime: str) -> tuple[Line | None, tuple[Kernel, ...]]:
        """The order line of a regime, or None, and all kernels, best first."""
        known = self._rankings.get(regime)
        if known is None:
            line = line_for(self._candidates.lines, self._device, regime)
            known = self._rankings[regime] = line, ranked(self._candidates.kernels, line)
        return known


def kernels_on(candidates: Candidates, problem: Any, machine: Machine) -> DeviceKernels:
    """The kernels on the problem's device, cached. It reads no other facet of the problem."""
    kept = machine.on(problem.device)
    kernels: DeviceKernels | None = kept.get(candidates)
    if kernels is None:
        kernels = kept[candidates] = DeviceKernels(candidates, problem, machine)
    return kernels


def evaluate(constraint: Constraint, problem: Any, machine: Machine) -> Rejection | None:
    """The rejection of a constraint. A constraint that raises rejects its own kernel and affects no other."""
    try:
        rejection = constraint.reject(problem, machine)
        if rejection is None or (isinstance(rejection, Rejection) and all(type(text) is str for text in rejection)):
            return rejection
        error = f"returned {_text(rejection)}, which is neither None nor a Rejection of three strings"
    except (Exception, SystemExit) as raised:  # constraints may be foreign
        error = f"raised {type(raised).__name__}: {_text(raised)}"
    return Rejection(CONSTRAINT_ERROR, f"{_text(constraint)} {error}", _FIX)


def _text(value: object) -> str:
    """A foreign value as text; its type if its `repr` raises."""
    try:
        return repr(value) if not isinstance(value, BaseException) else str(value)
    except Exception:
        return f"a {type(value).__name__}"


def _on_device(kernel: Kernel, problem: Any, machine: Machine) -> OnDevice:
    parts: dict[Rejection | int, Rejection | Constraint] = {}  # several probes of one library give one rejection
    for place, constraint in enumerate(kernel.constraints):
        if isinstance(constraint, Anything):
            continue
        if not set(constraint.fields) <= _DEVICE:
            parts[place] = constraint
        elif (rejection := evaluate(constraint, problem, machine)) is not None:
            parts.setdefault(rejection, rejection)
    against = [part for part in parts.values() if isinstance(part, Rejection)]
    elsewhere = any(rejection.code in OF_DEVICES for rejection in against)
    refused = any(rejection.code != NOT_BUILT for rejection in against)
    kept = tuple(against) if elsewhere else tuple(parts.values())
    one_of = tuple(
        (part.field, part.values)
        for part in kept
        if type(part) is OneOf and part.code != NOT_BUILT and all(type(value) in _PLAIN for value in part.values)
    )
    return OnDevice(kept, refused, one_of, kernel.standing_on(problem.device.family))


class Inputs(NamedTuple):
    """Everything that a selection depends on, at the time of the selection.

    Attributes:
        op: name of the op.
        schema: facets of the op.
        problem: the problem.
        features: features that the problem needs.
        candidates: the registered kernels and their known defects.
        on_device: the same kernels, evaluated for the problem's device.
        machine: facts of the machine.
        quarantined: by (op, kernel), rejections of kernels that were found wrong on the device.
        earned: by (op, kernel), the problem classes that were verified on the device.
        policy: the policy for this problem.
        parts: for each kernel that is made of other ops, their selections.
    """

    op: str
    schema: Schema
    problem: Any
    features: Sequence[str]
    candidates: Candidates
    on_device: DeviceKernels
    machine: Machine
    quarantined: Mapping[tuple[str, str], Rejection]
    earned: Mapping[tuple[str, str], Collection[Any]]
    policy: Policy
    parts: Mapping[Kernel, tuple[Selection[Any], ...]]


def can_run(inputs: Inputs, kernel: Kernel) -> bool:
    """Whether there is no reason against a kernel."""
    on_device, problem = inputs.on_device.by_kernel[kernel], inputs.problem
    if not forced_past_limits(inputs, kernel):
        if on_device.refused:
            return False
        for facet, values in on_device.one_of:  # most kernels fail here, without the words of a reason
            if getattr(problem, facet, _MISSING) not in values:
                return False
    if _distrusts(inputs, kernel):  # before the reasons, since composing the rejection's command is slow
        return False
    return next(reasons(inputs, kernel, trusted=True), None) is None


def reasons(inputs: Inputs, kernel: Kernel, *, trusted: bool = False) -> Iterator[Rejection]:
    """Every reason against one kernel. A kernel for other devices has only that reason.

    `trusted` means that the policy of trust was evaluated before and accepts the kernel.
    """
    policy, machine = inputs.policy, inputs.machine
    if policy.disables:
        for override in policy.removing(inputs.op, kernel):
            yield Rejection(
                "disabled", f"disabled by {override.origin}", override.undo or f"remove it from {override.origin}"
            )
    if policy.barred:
        yield from policy.barred.get("*", ())
        yield from policy.barred.get(kernel.name, ())
    failure = machine.load_failures.get((inputs.op, kernel.name)) if machine.load_failures else None
    if forced_past_limits(inputs, kernel):
        if failure is not None:  # `unsafe` cannot run a kernel that cannot be loaded
            yield failure
        return
    for part in inputs.on_device.by_kernel[kernel].parts:
        rejection = part if isinstance(part, Rejection) else evaluate(part, inputs.problem, machine)
        if rejection is not None and (rejection.code != NOT_BUILT or not _named(inputs, kernel)):
            yield rejection
    for name in inputs.features:
        if name not in kernel.features:
            yield Rejection("feature", f"does not support {name}")
    for selection in inputs.parts.get(kernel, ()):
        if selection.kernel is None:
            yield _lacks_part(selection)
    if failure is not None:
        yield failure
    if policy.deterministic and not kernel.deterministic:
        yield Rejection("nondeterministic", "results may differ in bits from run to run")
    if policy.batch_invariant and not kernel.batch_invariant:
        yield Rejection("batch_variant", "a row's bits may depend on the rest of the batch")
    for entry in inputs.candidates.known_bad_of(kernel):
        for condition in entry.where:
            rejection = evaluate(condition, inputs.problem, machine)
            if rejection is not None:
                if rejection.code == CONSTRAINT_ERROR:  # whether the defect applies is unknown
                    yield rejection
                break
        else:
            yield Rejection("known_bad", f"{entry.symptom} ({entry.issue})", entry.remedy)
    if inputs.quarantined and (found := inputs.quarantined.get((inputs.op, kernel.name))) is not None:
        yield found
    if not trusted and (distrust := distrusted(inputs, kernel)) is not None:
        yield distrust
    layout = getattr(inputs.problem, WEIGHT_LAYOUT, CHECKPOINT)
    if layout not in kernel.layouts and not (layout == CHECKPOINT and inputs.policy.packing and kernel.packs_to):
        yield _layout_rejection(kernel, layout, inputs.candidates.kernels)


def _lacks_part(selection: Selection[Any]) -> Rejection:
    """The rejection of a kernel that is made of ops one of which has no kernel."""
    others = [decision for decision in selection.decisions if decision.code not in OF_DEVICES]
    why = "; ".join(f"{decision.kernel} {decision.reason}" for decision in others)
    remedy = next((decision.remedy for decision in others if decision.remedy), "")
    return Rejection("part", f"{selection.op} has no kernel: {why or selection.because}", remedy)


def distrusted(inputs: Inputs, kernel: Kernel) -> Rejection | None:
    """The rejection of a kernel by the policy of trust on this family of devices, or None."""
    if not _distrusts(inputs, kernel):
        return None
    standing = inputs.on_device.by_kernel[kernel].standing
    if standing.word == KNOWN_BAD:
        return Rejection(KNOWN_BAD, standing.evidence, "to run it anyway: backend= inside use(unsafe=True)")
    if standing.word == OPT_IN:
        return Rejection(OPT_IN, f"opt-in: {standing.evidence}", f"backend={kernel.name!r}")
    known = f" (published: {standing.figure or standing.evidence})" if standing.word == PUBLISHED else ""
    reason = f"untested on {inputs.problem.device.arch}{known}"
    if inputs.policy.trust == MEASURED:
        return Rejection(UNTRUSTED, reason, "KERNELHUB_TRUST=here, then `kernelhub verify`")
    command = " ".join(
        ["kernelhub verify", inputs.op, f"--backend {kernel.name}", *flags_of(inputs.schema, inputs.problem)]
    )
    return Rejection(UNTRUSTED, reason, f"{command} (about {standing.seconds:.0f} s)")


def _distrusts(inputs: Inputs, kernel: Kernel) -> bool:
    """Whether the policy of trust rejects a kernel that is not forced past its limits.

    Portable kernels need no evidence: they run if no other kernel is trusted. A kernel that the weights are packed for
    needs none either: it was selected or requested when they were packed. If several kernels read one layout, and one
    of them is trusted, the weights were packed for that one.
    """
    doubts = _doubts(inputs, kernel)
    layout = getattr(inputs.problem, WEIGHT_LAYOUT, CHECKPOINT)
    if not doubts or layout == CHECKPOINT or inputs.on_device.by_kernel[kernel].standing.word == KNOWN_BAD:
        return doubts
    return any(
        not _doubts(inputs, other) and next(reasons(inputs, other), None) is None
        for other in inputs.candidates.kernels
        if other is not kernel and layout in other.layouts
    )


def _doubts(inputs: Inputs, kernel: Kernel) -> bool:
    """Whether the policy of trust rejects a kernel, regardless of the layout of the weights."""
    word, trust = inputs.on_device.by_kernel[kernel].standing.word, inputs.policy.trust
    if word == VERIFIED:
        return False
    if word == KNOWN_BAD:
        return not forced_past_limits(inputs, kernel)
    if word != OPT_IN:
        if kernel in inputs.candidates.portable or trust == ANY or (trust == VENDOR and word == PUBLISHED):
            return False
        if trust != MEASURED and _has_earned(inputs, kernel):
            return False
    return not inputs.policy.names(inputs.op, kernel)


def _has_earned(inputs: Inputs, kernel: Kernel) -> bool:
    """Whether the kernel was verified on this device for exactly this problem class with checkpoint weights."""
    classes = inputs.earned.get((inputs.op, kernel.name)) if inputs.earned else None
    return classes is not None and unpacked_facets(inputs.problem) in classes


def flags_of(schema: Schema, problem: Any) -> list[str]:
    """A problem class as flags of the commands; at least one, since a command without flags means all classes."""
    facets = dict(unpacked_facets(problem))
    first = next(iter(facets))
    return schema.flags(facets) or [flag_of(schema.facets[first], facets[first])]


def forced_past_limits(inputs: Inputs, kernel: Kernel) -> bool:
    """Whether the user requests the kernel with `unsafe`, which overrules every reason."""
    return inputs.policy.unsafe and _requested(inputs, kernel)


def _requested(inputs: Inputs, kernel: Kernel) -> bool:
    request = inputs.policy.request_for(inputs.op)
    return request is not None and not request.pinned and request.means(kernel)


def _named(inputs: Inputs, kernel: Kernel) -> bool:
    """Whether the user requests or prefers the kernel, by its name or its backend's."""
    return _requested(inputs, kernel) or any(
        override.means(kernel) for override in inputs.policy.preferences_for(inputs.op)
    )


def _layout_rejection(kernel: Kernel, layout: str, kernels: Sequence[Kernel]) -> Rejection:
    """The rejection of a kernel that does not read this layout; the remedy names the kernels that do."""
    reason = f"reads weights as {' or '.join(kernel.layouts)}; these are {layout}"
    if layout == CHECKPOINT:
        return Rejection(
            "layout", reason, f"pack them as {kernel.packs_to or kernel.layouts[0]}: prepare(...).pack(...)"
        )
    readers = [other.name for other in kernels if layout in other.layouts]
    unpack = "pass checkpoint weights, which PackedWeight.unpack() returns"
    return Rejection("layout", reason, f"run {' or '.join(readers)}, or {unpack}" if readers else unpack)
