"""Every reason against a kernel, one after the other: who only wants to know whether there is one stops at the first.

A `Question` holds all that reasons are made from, as it was when the question was asked. So a choice asks no more than
it needs, and what it did not ask for can be told later, and is the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kernelhub.dispatch.candidates import Candidates
from kernelhub.dispatch.constraint import NOT_BUILT, Rejection
from kernelhub.dispatch.held import Facets, facets_of
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.lineup import CONSTRAINT_ERROR, Lineup, said_by
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.policy import Policy
from kernelhub.dispatch.problem import CHECKPOINT, WEIGHT_LAYOUT, Schema, flag_of
from kernelhub.dispatch.standing import ANY, KNOWN_BAD, MEASURED, OPT_IN, PUBLISHED, UNTRUSTED, VENDOR, VERIFIED


class Question(NamedTuple):
    """Which kernel runs a problem: everything the answer depends on.

    Attributes:
        op: name of the op.
        schema: its facets.
        problem: what is asked.
        features: those that the problem uses.
        candidates: the kernels there are, and their known defects.
        lineup: the same as they stand on the problem's device.
        machine: facts of the machine, as they were at the time.
        quarantined: by (op, kernel), what was found wrong on the device, as it was at the time.
        earned: by (op, kernel), the problem classes that it was verified for on the device, as they were at the time.
        policy: what the user said about this problem.
    """

    op: str
    schema: Schema
    problem: Any
    features: Sequence[str]
    candidates: Candidates
    lineup: Lineup
    machine: Machine
    quarantined: Mapping[tuple[str, str], Rejection]
    earned: Mapping[tuple[str, str], Collection[Any]]
    policy: Policy


def can_run(asked: Question, kernel: Kernel) -> bool:
    """Is there no reason against a kernel?"""
    if asked.lineup.on_device[kernel].refused and not forced_past_limits(asked, kernel):
        return False
    if _distrusts(asked, kernel):  # asked first, since the reason names a command that takes a while to write
        return False
    return next(reasons(asked, kernel, trusted=True), None) is None


def reasons(asked: Question, kernel: Kernel, *, trusted: bool = False) -> Iterator[Rejection]:
    """Every reason against one kernel, but that one for other devices is not asked about the problem.

    `trusted` says that trust was asked already, and speaks not against the kernel.
    """
    policy, machine = asked.policy, asked.machine
    if policy.disables:
        for override in policy.removing(asked.op, kernel):
            yield Rejection(
                "disabled", f"disabled by {override.origin}", override.undo or f"remove it from {override.origin}"
            )
    if policy.barred:
        yield from policy.barred.get("*", ())
        yield from policy.barred.get(kernel.name, ())
    failure = machine.load_failures.get((asked.op, kernel.name)) if machine.load_failures else None
    if forced_past_limits(asked, kernel):
        if failure is not None:  # what cannot be loaded cannot be run past anything
            yield failure
        return
    for part in asked.lineup.on_device[kernel].parts:
        rejection = part if isinstance(part, Rejection) else said_by(part, asked.problem, machine)
        if rejection is not None and (rejection.code != NOT_BUILT or not _named(asked, kernel)):
            yield rejection
    for name in asked.features:
        if name not in kernel.features:
            yield Rejection("feature", f"does not support {name}")
    if failure is not None:
        yield failure
    if policy.deterministic and not kernel.deterministic:
        yield Rejection("nondeterministic", "may give other bits from run to run")
    if policy.batch_invariant and not kernel.batch_invariant:
        yield Rejection("batch_variant", "a row's bits may depend on the rest of the batch")
    for entry in asked.candidates.known_bad_of(kernel):
        for condition in entry.where:
            said = said_by(condition, asked.problem, machine)
            if said is not None:
                if said.code == CONSTRAINT_ERROR:  # whether the defect is met cannot be told
                    yield said
                break
        else:
            yield Rejection("known_bad", f"{entry.symptom} ({entry.issue})", entry.remedy)
    if asked.quarantined and (found := asked.quarantined.get((asked.op, kernel.name))) is not None:
        yield found
    if not trusted and (distrust := distrusted(asked, kernel)) is not None:
        yield distrust
    layout = getattr(asked.problem, WEIGHT_LAYOUT, CHECKPOINT)
    if layout not in kernel.layouts and not (layout == CHECKPOINT and asked.policy.packing and kernel.packs_to):
        yield _layout_rejection(kernel, layout, asked.candidates.kernels)


def distrusted(asked: Question, kernel: Kernel) -> Rejection | None:
    """What the policy of trust says against a kernel on this family of devices."""
    if not _distrusts(asked, kernel):
        return None
    standing = asked.lineup.on_device[kernel].standing
    if standing.word == KNOWN_BAD:
        return Rejection(KNOWN_BAD, standing.evidence, "use(unsafe=True) with backend= runs it as it is")
    if standing.word == OPT_IN:
        return Rejection(OPT_IN, f"runs only where it is asked for: {standing.evidence}", f"backend={kernel.name!r}")
    known = f" (published: {standing.figure or standing.evidence})" if standing.word == PUBLISHED else ""
    reason = f"untested on {asked.problem.device.arch}{known}"
    if asked.policy.trust == MEASURED:
        return Rejection(UNTRUSTED, reason, "KERNELHUB_TRUST=here, then `kernelhub verify`")
    command = " ".join(
        ["kernelhub verify", asked.op, f"--backend {kernel.name}", *flags_of(asked.schema, asked.problem)]
    )
    return Rejection(UNTRUSTED, reason, f"{command} (about {standing.seconds:.0f} s)")


def _distrusts(asked: Question, kernel: Kernel) -> bool:
    """Whether the policy of trust speaks against a kernel, unless it is forced past its limits.

    Portable kernels need no evidence: something must run where nothing else is trusted. Nor do weights that are packed
    for a kernel: who packed them had it chosen, or named it. Where several kernels read one layout, and one of them is
    trusted, it was packed for that one.
    """
    doubts = _doubts(asked, kernel)
    layout = getattr(asked.problem, WEIGHT_LAYOUT, CHECKPOINT)
    if not doubts or layout == CHECKPOINT or asked.lineup.on_device[kernel].standing.word == KNOWN_BAD:
        return doubts
    return any(
        not _doubts(asked, other) and next(reasons(asked, other), None) is None
        for other in asked.candidates.kernels
        if other is not kernel and layout in other.layouts
    )


def _doubts(asked: Question, kernel: Kernel) -> bool:
    """Whether the policy of trust speaks against a kernel, whoever packed the weights."""
    word, trust = asked.lineup.on_device[kernel].standing.word, asked.policy.trust
    if word == VERIFIED:
        return False
    if word == KNOWN_BAD:
        return not forced_past_limits(asked, kernel)
    if word != OPT_IN:
        if kernel in asked.candidates.portable or trust == ANY or (trust == VENDOR and word == PUBLISHED):
            return False
        if trust != MEASURED and _has_earned(asked, kernel):
            return False
    return not asked.policy.names(asked.op, kernel)


def _has_earned(asked: Question, kernel: Kernel) -> bool:
    """Whether the kernel was verified on this device for exactly this problem class, weights as in a checkpoint."""
    classes = asked.earned.get((asked.op, kernel.name)) if asked.earned else None
    return classes is not None and class_of(asked.problem) in classes


def class_of(problem: Any) -> Facets:
    """The problem class that a verification covers: every facet but the device, weights as they lie in a checkpoint.

    Packed weights are the arrangement of one kernel, made from a checkpoint's, and are verified with it.
    """
    facets = facets_of(problem)
    if getattr(problem, WEIGHT_LAYOUT, CHECKPOINT) == CHECKPOINT:
        return facets
    return tuple((name, CHECKPOINT if name == WEIGHT_LAYOUT else value) for name, value in facets)


def flags_of(schema: Schema, problem: Any) -> list[str]:
    """A problem class as flags of the commands: at least one, since a command without any is about no class."""
    facets = dict(class_of(problem))
    first = next(iter(facets))
    return schema.flags(facets) or [flag_of(schema.facets[first], facets[first])]


def forced_past_limits(asked: Question, kernel: Kernel) -> bool:
    """Does the user ask for the kernel whatever speaks against it?"""
    return asked.policy.unsafe and _asked_for(asked, kernel)


def _asked_for(asked: Question, kernel: Kernel) -> bool:
    request = asked.policy.request_for(asked.op)
    return request is not None and not request.fixed and request.means(kernel)


def _named(asked: Question, kernel: Kernel) -> bool:
    """Whether the user asks for the kernel or prefers it, by its name or its backend's."""
    return _asked_for(asked, kernel) or any(
        override.means(kernel) for override in asked.policy.preferences_for(asked.op)
    )


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
