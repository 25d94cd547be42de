"""The table of plans behind one op, and what its public function is.

An op's function computes a key from its arguments and asks `table.get(key)`, or under an override
`Op.override`, for the function to run. Where that gives none it checks its arguments and asks
`Op.decide`, which decides once and remembers. The key is made of the op's declared facets, and the
problem is made from the key and the device alone: equal keys on equal devices give equal selections.

The device is not in the key, because it hardly ever changes and reading it costs as much as hashing the
rest: the function that a table holds knows the device it was bound for, and passes a call from another
device on to the one bound there.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, ParamSpec, Protocol, TypeVar, cast, overload

import torch

from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.constraint import Rejection
from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.forms import written
from kernelhub.dispatch.gate import GATE, Caller
from kernelhub.dispatch.hub import HUB, Outdated, keep
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.policy import Layers, Names, Policy, names_asked_for
from kernelhub.dispatch.problem import ProblemT
from kernelhub.dispatch.select import no_kernel
from kernelhub.dispatch.selection import Selection
from kernelhub.dispatch.shapes import standing_in
from kernelhub.errors import InvalidArgument, NoKernel

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
PlanT = TypeVar("PlanT", covariant=True)

Backend = str | tuple[str, ...] | list[str] | None
Key = Hashable
Run = Callable[..., Any]


class Request(NamedTuple):
    """What a kernel is selected for.

    Attributes:
        backend: the call's ``backend=``.
        contexts: the layers of the blocks that the call is in.
        key: the call's key.
        device: index of the operands' GPU, -1 for the CPU.
    """

    backend: Names | None
    contexts: Layers
    key: Key
    device: int


@dataclass(frozen=True)
class DryRun:
    """Given as ``backend=``, it makes an op check its arguments and return a `ParsedCall` instead of running.

    So `prepare` and `explain` parse a call exactly as the call itself does.
    """

    backend: Backend


@dataclass(frozen=True)
class ParsedCall:
    """What an op returns for a `DryRun`.

    Attributes:
        key: the call's key.
        device: index of the operands' GPU, -1 for the CPU.
        arguments: as the op passes them to the function that its table holds.
        shapes: parameters that were given as meta tensors; zeros stand for them in `arguments`.
    """

    key: Key
    device: int
    arguments: tuple[Any, ...]
    shapes: frozenset[str] = frozenset()

    def check_kept(self, op: str, *parameters: str) -> None:
        """Values that a plan keeps must be given.

        Raises:
            InvalidArgument: one of the parameters was given as a meta tensor.
        """
        for parameter in parameters:
            if parameter in self.shapes:
                raise InvalidArgument(
                    op, parameter, "is on meta", "the plan keeps its values: give a tensor with memory"
                )


class Op(Generic[ProblemT]):
    """Decides for one op and remembers.

    Attributes:
        contract: what the op is.
        function: the public function.
        traced: what stands for it in traced code.
        table: key -> function to run, where neither the call nor a context says otherwise.
    """

    def __init__(self, contract: Contract[ProblemT]) -> None:
        self.contract = contract
        self.function: Callable[..., Any]
        self.traced: Callable[..., Any]
        self.table: dict[Key, Run] = {}
        self._overrides: dict[tuple[Backend, Layers, Key], Run] = {}
        self._bound: dict[Request, Bound] = {}  # where neither the call nor a context says otherwise
        self._bound_otherwise: dict[Request, Bound] = {}
        self._prepared: dict[Key, dict[str, Any]] = {}  # forms of the arguments that plans were prepared with
        HUB.on_change(self._forget)
        HUB.on_loss(self._forget_device)

    def override(self, key: Key, backend: Backend | DryRun) -> Run | None:
        """The function to run where the call or a context says what it wants; None if not yet decided."""
        if type(backend) is list:
            backend = tuple(backend)
        try:
            return self._overrides.get((cast(Backend, backend), HUB.contexts.get(), key))
        except TypeError:  # one of the two cannot be a key; of the rest of the key the op's checks report it
            names_asked_for(self.contract.name, backend.backend if isinstance(backend, DryRun) else backend)
            raise

    def decide(self, key: Key, device: int, backend: Backend | DryRun) -> Run:
        """The function to run for a key that is new; the op has checked its arguments.

        Args:
            key: the call's key.
            device: index of the operands' GPU, -1 for the CPU, as `Tensor.get_device` gives it.
            backend: the call's ``backend=``.
        """
        if isinstance(backend, DryRun):
            return lambda *arguments: ParsedCall(key, device, arguments)
        if type(backend) is list:
            backend = tuple(backend)
        contexts = HUB.contexts.get()
        generation = HUB.generation
        bound = self.bound_for(key, device, backend)
        with HUB.lock:
            if GATE.lost:
                GATE.check_device(device)
            if generation == HUB.generation:
                if backend is None and not contexts:
                    self.table[key] = bound.run
                else:
                    keep(self._overrides, (backend, contexts, key), bound.run)
        return bound.run

    def bound_for(self, key: Key, device: int, backend: Backend) -> Bound:
        """The selection on a key on one device, made ready.

        Raises:
            NotWarmed: there is none yet, and kernelhub is sealed.
            DeviceLost: a device error ended the use of the device.
        """
        if GATE.lost:
            GATE.check_device(device)
        request = Request(names_asked_for(self.contract.name, backend), HUB.contexts.get(), key, device)
        table = self._bound_otherwise if request.backend is not None or request.contexts else self._bound
        bound = table.get(request)
        if bound is not None:
            return bound
        _ = HUB.settings
        op, problem = self.contract.name, self.contract.problem_of(key, device)
        if GATE.refuse is not None:
            for other, made in self._requests():  # another key may mean the same
                if other == request._replace(key=other.key) and made.selection.problem == problem:
                    return made
            raise GATE.refuse("decide", "which kernel runs", Caller(op, "", problem, key, sys._getframe(1)))

        def elsewhere(other: int) -> Run:
            return self.bound_for(key, other, backend).run

        def remember(bound: Bound) -> None:
            with HUB.lock:
                if GATE.lost:
                    GATE.check_device(device)
                if generation != HUB.generation:
                    return  # it serves this call
                if table is self._bound:
                    table[request] = bound
                else:
                    keep(table, request, bound)

        while True:
            generation = HUB.generation
            policy = HUB.policy(op, request.backend, request.contexts)
            made_elsewhere = functools.partial(table.get, request)
            try:
                return HUB.bind(op, problem, policy, device, elsewhere, generation, made_elsewhere, remember)
            except Outdated:
                continue

    def ready(self) -> tuple[ProblemT, ...]:
        """The problems that were decided and made ready, oldest first."""
        return tuple(dict.fromkeys(bound.selection.problem for _, bound in self._requests()))

    def _requests(self) -> list[tuple[Request, Bound]]:
        return [*self._bound.items(), *self._bound_otherwise.items()]

    def forms_of(self, key: Key, bound: Bound | None) -> dict[str, Any]:
        """Forms of the arguments that `prepare` was called with for a key, or for one of those that are bound so."""
        keys = [key] if key is not None else [request.key for request, other in self._requests() if other is bound]
        return next((self._prepared[key] for key in keys if key in self._prepared), {})

    def parse(self, backend: Backend, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ParsedCall:
        """How the op's function reads these arguments; meta tensors are read as tensors of unknown values."""
        if type(backend) is list:
            backend = tuple(backend)
        shapes: frozenset[str] = frozenset()
        with standing_in(self.function, args, kwargs) as stand_ins:
            if stand_ins is not None:
                args, kwargs, shapes = (), stand_ins.arguments, stand_ins.parameters
            parsed: ParsedCall = self.function(*args, **kwargs, backend=DryRun(backend))
        if parsed.key not in self._prepared:
            given = inspect.signature(self.function).bind(*args, **kwargs).arguments
            if backend is not None:
                given["backend"] = backend
            self._prepared[parsed.key] = written(given, device_of(parsed.device))
        return replace(parsed, shapes=shapes) if shapes else parsed

    def select(
        self,
        problem: ProblemT,
        backend: Backend,
        machine: Any = None,
        *,
        packing: bool = False,
        barred: Mapping[str, tuple[Rejection, ...]] | None = None,
    ) -> Selection[ProblemT]:
        """The selection alone; nothing is loaded.

        Args:
            problem: what is asked.
            backend: the call's ``backend=``.
            machine: facts of another machine.
            packing: weights as in a checkpoint will be packed for whichever kernel is chosen.
            barred: what else speaks against kernels, by name.
        """
        return HUB.select_as_called(self.contract.name, problem, backend, machine, packing=packing, barred=barred)

    def no_kernel(self, selection: Selection[ProblemT], backend: Backend) -> NoKernel:
        """The error that nothing may run what a selection found no kernel for."""
        return no_kernel(selection, self.policy(backend).about(selection.problem, HUB.machine))

    def ranked(self, problem: ProblemT, backend: Backend) -> Sequence[Kernel]:
        """The kernels that may run, best first, whether or not they can run this."""
        return HUB.ranked(self.contract.name, problem, self.policy(backend))

    def policy(self, backend: Backend) -> Policy:
        """What the user said about the op, here and now."""
        return HUB.policy(self.contract.name, names_asked_for(self.contract.name, backend), HUB.contexts.get())

    def kernels(self) -> tuple[str, ...]:
        """Names of every registered kernel, sorted."""
        _ = HUB.settings
        return tuple(sorted(kernel.name for kernel in HUB.registry.candidates(self.contract.name).kernels))

    def _forget(self) -> None:
        self.table.clear()
        self._overrides.clear()
        self._bound.clear()
        self._bound_otherwise.clear()
        self._prepared.clear()

    def _forget_device(self, device: int) -> None:
        """Have the next call on the device come to `bound_for`, which refuses it."""
        runs = {id(bound.run) for request, bound in self._requests() if request.device == device}
        for key in [key for key, run in self.table.items() if id(run) in runs]:
            del self.table[key]
        for request in [request for request, run in self._overrides.items() if id(run) in runs]:
            del self._overrides[request]


def device_of(index: int) -> torch.device:
    """The device that operands of this index lie on."""
    return torch.device("cpu") if index < 0 else torch.device("cuda", index)


class OpFunction(Protocol[P, R, PlanT]):
    """A public op: a function, with its plans, selections and reference hanging on it."""

    __name__: str
    __doc__: str | None
    op: Op[Any]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    @overload
    def prepare(self, *args: P.args, **kwargs: P.kwargs) -> PlanT:
        """Choose once, for arguments like these; see `kernelhub.dispatch.plan`.

        Meta tensors are taken too, for shapes and dtypes alone (`kernelhub.dispatch.shapes`).
        """

    @overload
    def prepare(self, *args: Any, packing: bool, **kwargs: Any) -> PlanT:
        """The same of an op whose weights can be packed; see `kernelhub.ops.packed`."""

    def explain(self, *args: Any, **kwargs: Any) -> Selection[Any]:
        """The selection on arguments like these; see `kernelhub.explain`."""

    def kernels(self) -> tuple[str, ...]:
        """Names of every registered kernel, sorted."""

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """The op in plain torch."""
