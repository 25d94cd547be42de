"""What the user said, from every place it can be said, as one value.

Order of decision, from the strongest:

1. ``disable`` from anywhere removes a kernel.
2. ``KERNELHUB_FORCE``
3. ``backend=`` of the call
4. ``use(...)``, innermost first
5. ``configure(...)``
6. pins of the problem class: what ranks agreed on, then ``KERNELHUB_LOCK``
7. ``prefer``: of contexts (innermost first), of `configure`, ``KERNELHUB_PREFER``, of the config file
8. variables of other projects, unless KERNELHUB_IGNORE_VLLM_ENV is set: their requests, if nothing above concerns the
   op, then their preferences
9. tuned evidence, then the order line of the device, then the band, then the name

1 to 6 are explicit: the kernel asked for runs, or the call fails with every reason. 7 and 9 only rank. So does a
foreign request as soon as anybody prefers anything for the op, and a foreign removal spares a kernel that
KERNELHUB_FORCE, KERNELHUB_PREFER, the config file or KERNELHUB_LOCK names. `unsafe` is for 2 to 5 alone.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from kernelhub.dispatch.constraint import Constraint, Rejection
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.problem_class import ProblemClass, device_key, facets_of
from kernelhub.dispatch.selection import Selection
from kernelhub.dispatch.standing import HERE
from kernelhub.errors import ConfigurationError

Names = tuple[str, ...]


def names_asked_for(op: str, backend: Any) -> Names | None:
    """``backend=`` of a call of an op as a tuple of names."""
    if backend is None:
        return None
    names = names_of(backend, f"{op}: backend")
    if not names:
        raise ConfigurationError(f"{op}: backend is {backend!r}; name a backend or a kernel, or leave it out")
    return names


def names_of(said: Any, where: str) -> Names:
    """What names backends or kernels, as a tuple; `where` is what it was said with, for the error."""
    names = (
        (said,) if isinstance(said, str) else tuple(said) if isinstance(said, (list, tuple, set, frozenset)) else None
    )
    if names is None or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(
            f"{where} is {said!r}; give the name of a backend or a kernel, or a list of names: "
            "`kernelhub backends` lists them"
        )
    return tuple(names)


FOREIGN = "engine"
LOCK, RANKS = "lock", "ranks"  # the sources of pins
_OWN_VARIABLES = ("force", "environment", "file", LOCK)
_NO_REFUSALS: Mapping[str, Rejection] = {}


@dataclass(frozen=True)
class Override:
    """Backends or kernels named for some ops, and where that was said.

    Attributes:
        ops: op name or glob.
        names: backends, kernels or globs over kernels, in order.
        source: stable word for the place: ``"force"``, ``"kwarg"``, ``"context"``, ``"configure"``,
            ``"ranks"``, ``"lock"``, ``"environment"``, ``"file"``, ``"engine"``.
        origin: the place as a user would write it, e.g. ``KERNELHUB_FORCE=triton``.
        where: the override is about those problems only that all of these take.
        undo: what takes the override back, where that is not clear from `origin`.
    """

    ops: str
    names: Names
    source: str
    origin: str
    where: tuple[Constraint, ...] = ()
    undo: str = ""

    @property
    def pinned(self) -> bool:
        """It repeats an earlier selection; no user wrote it for this run."""
        return self.source in (LOCK, RANKS)

    def concerns(self, op: str) -> bool:
        return self.ops == "*" or self.ops == op or fnmatch.fnmatchcase(op, self.ops)

    def means(self, kernel: Kernel) -> bool:
        """Does it name this kernel?"""
        return any(kernel.matches(name) for name in self.names)


@dataclass(frozen=True, eq=False)
class Pins:
    """Kernels that a lock file, or an agreement of ranks, pins for the problem classes of one op.

    Attributes:
        overrides: the kernels that run, by problem class.
        refusals: kernels that may not run, by problem class, each with the reason.
        of_device: whether a class belongs to one device; else it holds on any.
        otherwise: what rejects every kernel of a class that is not in `overrides`, or None.
    """

    overrides: Mapping[ProblemClass, Override]
    refusals: Mapping[ProblemClass, Mapping[str, Rejection]] = field(default_factory=dict)
    of_device: bool = True
    otherwise: Rejection | None = None

    def key(self, problem: Any) -> ProblemClass:
        """The class of a problem."""
        return ProblemClass(device_key(problem.device) if self.of_device else None, facets_of(problem))


class Agreed(Protocol):
    """What ranks agreed on for one op."""

    @property
    def pins(self) -> Pins: ...

    def check(self, selection: Selection[Any]) -> None:
        """Raise if this rank selected another kernel than was agreed on."""


@dataclass(frozen=True, eq=False)
class Layer:
    """What one place says: a context, a `configure` call, the environment or a config file.

    Layers are told apart by identity, which keeps them cheap in the key of a table.
    `deterministic`, `batch_invariant`, `strict`, `unsafe` and `trust` are None where the place is silent, and so are
    `audit` and `audit_action`, which `configure` alone says.
    """

    requests: tuple[Override, ...] = ()
    prefers: tuple[Override, ...] = ()
    disables: tuple[Override, ...] = ()
    deterministic: bool | None = None
    batch_invariant: bool | None = None
    strict: bool | None = None
    unsafe: bool | None = None
    trust: str | None = None
    audit: float | None = None
    audit_action: str | None = None


Layers = tuple[Layer, ...]


@dataclass(frozen=True)
class Policy:
    """All layers put together for one call; what the selector reads.

    Attributes:
        requests: explicit choices, strongest first; the first that concerns the op decides.
        prefers: soft overrides, strongest first.
        disables: every removal, whoever said it.
        trust: on whose word a kernel may be chosen: ``"here"``, ``"vendor"`` or ``"measured"``; ``"any"`` asks nothing,
            for those who look for what could be verified.
        packing: weights that are as in a checkpoint will be packed for whichever kernel is chosen, before it runs.
        pins: of the op's problem classes, strongest first.
        barred: kernels that the pins reject, once the policy is about one problem; under ``"*"`` what rejects every
            kernel.
    """

    requests: tuple[Override, ...] = ()
    prefers: tuple[Override, ...] = ()
    disables: tuple[Override, ...] = ()
    deterministic: bool = False
    batch_invariant: bool = False
    strict: bool = False
    unsafe: bool = False
    trust: str = HERE
    packing: bool = False
    pins: tuple[Pins, ...] = ()
    barred: Mapping[str, tuple[Rejection, ...]] = field(default_factory=dict)

    def request_for(self, op: str) -> Override | None:
        """The explicit choice that decides for `op`, or None if nothing explicit was said."""
        return next((override for override in self.requests if override.concerns(op)), None) if self.requests else None

    def preferences_for(self, op: str) -> tuple[Override, ...]:
        """The soft overrides that concern `op`, strongest first."""
        return tuple([override for override in self.prefers if override.concerns(op)]) if self.prefers else ()

    def names(self, op: str, kernel: Kernel) -> bool:
        """Is the kernel requested, preferred or pinned, by its name or its backend's?"""
        request = self.request_for(op)
        return (request is not None and request.means(kernel)) or any(
            override.means(kernel) for override in self.preferences_for(op)
        )

    def has_pinned(self) -> bool:
        """Is a kernel pinned for the problem that this policy is about?"""
        return bool(self.requests) and any(override.pinned for override in self.requests)

    def removing(self, op: str, kernel: Kernel) -> list[Override]:
        """The overrides by which a kernel of `op` may not run."""
        removals = [override for override in self.disables if override.concerns(op) and override.means(kernel)]
        if any(override.source == FOREIGN for override in removals) and self._named_by_own_variables(op, kernel):
            return [override for override in removals if override.source != FOREIGN]
        return removals

    def _named_by_own_variables(self, op: str, kernel: Kernel) -> bool:
        return any(
            override.source in _OWN_VARIABLES and override.concerns(op) and override.means(kernel)
            for override in (*self.requests, *self.prefers)
        )

    def about(self, problem: Any, machine: Machine) -> Policy:
        """The same policy without overrides that are about other problems, and with the pins of this one."""
        if self.pins:
            return self.pinning(problem).about(problem, machine)
        said = (*self.requests, *self.prefers, *self.disables)
        if not said or not any(override.where for override in said):
            return self

        def kept(overrides: tuple[Override, ...]) -> tuple[Override, ...]:
            return tuple(
                override
                for override in overrides
                if all(item.reject(problem, machine) is None for item in override.where)
            )

        return replace(self, requests=kept(self.requests), prefers=kept(self.prefers), disables=kept(self.disables))

    def pinning(self, problem: Any) -> Policy:
        """The same policy with the pins of a problem: weaker than users' requests, stronger than the rest.

        `Pins.otherwise` rejects a problem that is not pinned only if no user requested a kernel.
        """
        overrides, barred = [], dict(self.barred)
        own = [override for override in self.requests if override.source != FOREIGN]
        for one in self.pins:
            key = one.key(problem)
            for kernel, rejection in one.refusals.get(key, _NO_REFUSALS).items():
                barred[kernel] = (*barred.get(kernel, ()), rejection)
            override = one.overrides.get(key)
            if override is not None:
                overrides.append(override)
            elif one.otherwise is not None and not own:
                barred["*"] = (*barred.get("*", ()), one.otherwise)
        foreign = self.requests[len(own) :]
        return replace(self, requests=(*own, *overrides, *foreign), pins=(), barred=barred)

    def asking(self, op: str, names: Names) -> Policy:
        """The same policy with ``backend=names`` on the call."""
        override = Override(op, names, "kwarg", f"backend={names[0] if len(names) == 1 else names!r}")
        forces = sum(1 for request in self.requests if request.source == "force")
        requests = (*self.requests[:forces], override, *self.requests[forces:])
        return replace(self, requests=requests)


def combine(layers: tuple[Layer, ...], foreign: Layer | None = None, op: str = "*") -> Policy:
    """One policy out of layers given strongest first.

    Args:
        layers: what was said to kernelhub.
        foreign: what variables of other projects say, weaker than all of it.
        op: the op that the policy is for; foreign requests depend on whether anybody prefers anything for it.
    """
    if foreign is not None:
        preferred = any(override.concerns(op) for layer in layers for override in layer.prefers)
        if preferred:
            foreign = replace(foreign, requests=(), prefers=(*foreign.requests, *foreign.prefers))
        layers = (*layers, foreign)

    def decided(name: str, default: Any = False) -> Any:
        return next((value for layer in layers if (value := getattr(layer, name)) is not None), default)

    return Policy(
        requests=tuple(override for layer in layers for override in layer.requests),
        prefers=tuple(override for layer in layers for override in layer.prefers),
        disables=tuple(override for layer in layers for override in layer.disables),
        deterministic=decided("deterministic"),
        batch_invariant=decided("batch_invariant"),
        strict=decided("strict"),
        unsafe=decided("unsafe"),
        trust=decided("trust", HERE),
    )
