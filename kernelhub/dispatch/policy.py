"""The policy: all requests, preferences, removals and settings that apply to a call, as one value.

From the strongest to the weakest:

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

1 to 6 are explicit: the requested kernel runs, or the call fails with every reason. 7 and 9 only rank. A request by a
variable of another project also only ranks if any preference exists for the op, and a removal by one does not apply to
a kernel that KERNELHUB_FORCE, KERNELHUB_PREFER, the config file or KERNELHUB_LOCK names. `unsafe` applies to 2 to 5.
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


def requested_names(op: str, backend: Any) -> Names | None:
    """``backend=`` of a call of an op as a tuple of names; ConfigurationError if it has none."""
    if backend is None:
        return None
    if isinstance(backend, (set, frozenset)):
        raise ConfigurationError(f"{op}: backend is {backend!r}; give a list or a tuple, in the order of preference")
    names = names_of(backend, f"{op}: backend")
    if not names:
        raise ConfigurationError(f"{op}: backend is {backend!r}; name a backend or a kernel, or leave it out")
    return names


def names_of(given: Any, where: str) -> Names:
    """Names of backends or kernels as a tuple; `where` is the parameter, for the error."""
    names = (
        (given,)
        if isinstance(given, str)
        else tuple(given)
        if isinstance(given, (list, tuple, set, frozenset))
        else None
    )
    if names is None or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(
            f"{where} is {given!r}; give the name of a backend or a kernel, or a list of names: "
            "`kernelhub backends` lists them"
        )
    return tuple(names)


FOREIGN = "engine"
LOCK, RANKS = "lock", "ranks"  # the sources of pins
_OWN_VARIABLES = ("force", "environment", "file", LOCK)
_NO_REFUSALS: Mapping[str, Rejection] = {}


@dataclass(frozen=True)
class Override:
    """A request, preference or removal: names of backends or kernels for some ops, with its source.

    Attributes:
        ops: op name or glob.
        names: backends, kernels or globs over kernels, in order.
        source: stable word for the source: ``"force"``, ``"kwarg"``, ``"context"``, ``"configure"``, ``"ranks"``,
            ``"lock"``, ``"environment"``, ``"file"``, ``"engine"``.
        origin: the source as a user writes it, e.g. ``KERNELHUB_FORCE=triton``.
        where: constraints; the override applies to the problems that none of them rejects.
        undo: how to remove the override, if `origin` does not show it.
    """

    ops: str
    names: Names
    source: str
    origin: str
    where: tuple[Constraint, ...] = ()
    undo: str = ""

    @property
    def pinned(self) -> bool:
        """Whether it repeats an earlier selection, of a lock file or an agreement of ranks."""
        return self.source in (LOCK, RANKS)

    def concerns(self, op: str) -> bool:
        return self.ops == "*" or self.ops == op or fnmatch.fnmatchcase(op, self.ops)

    def means(self, kernel: Kernel) -> bool:
        """Whether it names this kernel."""
        return any(kernel.matches(name) for name in self.names)


@dataclass(frozen=True, eq=False)
class Pins:
    """Kernels that a lock file, or an agreement of ranks, fixes for the problem classes of one op.

    Attributes:
        overrides: the kernel that runs, by problem class.
        refusals: kernels that may not run, by problem class, each with its rejection; ``"*"`` means every kernel.
        of_device: whether a problem class includes the device; else it applies to any device.
        otherwise: rejection of every kernel for a class that is not in `overrides`; None if such classes are free.
    """

    overrides: Mapping[ProblemClass, Override]
    refusals: Mapping[ProblemClass, Mapping[str, Rejection]] = field(default_factory=dict)
    of_device: bool = True
    otherwise: Rejection | None = None

    def key(self, problem: Any) -> ProblemClass:
        """The class of a problem."""
        return ProblemClass(device_key(problem.device) if self.of_device else None, facets_of(problem))


class Agreed(Protocol):
    """An agreement of ranks for one op."""

    @property
    def pins(self) -> Pins: ...

    def check(self, selection: Selection[Any]) -> None:
        """Raise RanksDisagree if this rank selected another kernel than was agreed on."""


@dataclass(frozen=True, eq=False)
class Layer:
    """The overrides and settings of one source: a `use` block, `configure`, the environment or a config file.

    Layers compare by identity, which keeps them cheap in the key of a table. `deterministic`, `batch_invariant`,
    `strict`, `unsafe` and `trust` are None if the source does not set them. So are `audit` and `audit_action`, which
    only `configure` sets.
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
    """All layers of one call combined, as the selector reads them.

    Attributes:
        requests: requests, strongest first; the first that concerns the op applies.
        prefers: preferences, strongest first.
        disables: removals from every source.
        deterministic, batch_invariant, strict, unsafe: as in `kernelhub.use`.
        trust: evidence that a kernel needs: ``"here"``, ``"vendor"`` or ``"measured"``, as in `kernelhub.use`; or
            ``"any"``, none, for commands that list what can be verified.
        packing: checkpoint weights will be packed for the selected kernel before it runs.
        pins: pins of the op's problem classes, strongest first; empty once the policy is for one problem.
        barred: further rejections, by kernel; under ``"*"`` those of every kernel.
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
        """The strongest request for `op`, or None."""
        return next((override for override in self.requests if override.concerns(op)), None) if self.requests else None

    def preferences_for(self, op: str) -> tuple[Override, ...]:
        """The preferences for `op`, strongest first."""
        return tuple([override for override in self.prefers if override.concerns(op)]) if self.prefers else ()

    def names(self, op: str, kernel: Kernel) -> bool:
        """Whether the kernel is requested, preferred or pinned, by its name or its backend's."""
        request = self.request_for(op)
        return (request is not None and request.means(kernel)) or any(
            override.means(kernel) for override in self.preferences_for(op)
        )

    def has_pinned(self) -> bool:
        """Whether a kernel is pinned for the problem of this policy."""
        return bool(self.requests) and any(override.pinned for override in self.requests)

    def removing(self, op: str, kernel: Kernel) -> list[Override]:
        """The removals that apply to a kernel of `op`."""
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
        """The same policy for one problem: without overrides for other problems, and with the problem's pins."""
        if self.pins:
            return self.pinning(problem).about(problem, machine)
        overrides = (*self.requests, *self.prefers, *self.disables)
        if not overrides or not any(override.where for override in overrides):
            return self

        def kept(overrides: tuple[Override, ...]) -> tuple[Override, ...]:
            return tuple(
                override
                for override in overrides
                if all(item.reject(problem, machine) is None for item in override.where)
            )

        return replace(self, requests=kept(self.requests), prefers=kept(self.prefers), disables=kept(self.disables))

    def pinning(self, problem: Any) -> Policy:
        """The same policy with the pins of a problem, weaker than users' requests and stronger than preferences.

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

    def requesting(self, op: str, names: Names) -> Policy:
        """The same policy with ``backend=names`` on the call."""
        override = Override(op, names, "kwarg", f"backend={names[0] if len(names) == 1 else names!r}")
        forces = sum(1 for request in self.requests if request.source == "force")
        requests = (*self.requests[:forces], override, *self.requests[forces:])
        return replace(self, requests=requests)


def combine(layers: tuple[Layer, ...], foreign: Layer | None = None, op: str = "*") -> Policy:
    """The policy of some layers.

    Args:
        layers: kernelhub's own layers, strongest first.
        foreign: the layer of other projects' variables, weaker than all others.
        op: the op that the policy is for; foreign requests only rank if a preference exists for it.
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
