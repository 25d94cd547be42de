"""`Op`: the table of bound kernels behind one op, and the type of its public function.

An op's function computes a key from its arguments and looks up the function to run in `table`, or under a request in
`Op.override`. On a miss it checks its arguments and calls `Op.decide`, which selects once and stores the result. The
key consists of the op's declared facets, and the problem is made from the key and the device alone: equal keys on equal
devices give equal selections.

The device is not in the key, because it seldom changes and reading it costs as much as hashing the rest. The function
in a table stores the device that it was bound for, and passes a call from another device to the function bound there.
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
from kernelhub.dispatch.forms import python_value, written
from kernelhub.dispatch.gate import GATE, Caller
from kernelhub.dispatch.hub import HUB, Outdated, keep
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.policy import Layers, Names, Policy, requested_names
from kernelhub.dispatch.problem import ProblemT
from kernelhub.dispatch.select import no_kernel
from kernelhub.dispatch.selection import Selection
from kernelhub.dispatch.shapes import parsing, standing_in
from kernelhub.dispatch.whole_calls import calls_of
from kernelhub.errors import InvalidArgument, NoKernel

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
PlanT = TypeVar("PlanT", covariant=True)

Backend = str | tuple[str, ...] | list[str] | None
Key = Hashable
Run = Callable[..., Any]


class Request(NamedTuple):
    """Key of the tables of bound selections.

    Attributes:
        backend: the call's ``backend=``.
        contexts: layers of the `use` blocks that the call is in.
        key: the call's key.
        device: index of the operands' GPU, -1 for the CPU.
    """

    backend: Names | None
    contexts: Layers
    key: Key
    device: int


class Before(NamedTuple):
    """The kernel that was selected last, for a call outside of `use` blocks, if it repeats calls.

    Attributes:
        generation: `HUB.generation` before the selection; in another one nothing is repeated.
        backend: the call's ``backend=``.
        repeat: makes a call like the kernel's last one, or returns None where it is not like it.
    """

    generation: int
    backend: Backend
    repeat: Run


@dataclass(frozen=True)
class DryRun:
    """A value of ``backend=`` with which an op checks its arguments and returns a `ParsedCall` instead of running.

    `prepare` and `explain` use it, so that they parse a call exactly as the call itself does.
    """

    backend: Backend


@dataclass(frozen=True)
class ParsedCall:
    """The result of an op for a `DryRun`.

    Attributes:
        key: the call's key.
        device: index of the operands' GPU, -1 for the CPU.
        arguments: arguments of the bound function, in its order.
        shapes: parameters that were given as meta tensors; `arguments` has zeros in their place.
    """

    key: Key
    device: int
    arguments: tuple[Any, ...]
    shapes: frozenset[str] = frozenset()

    def check_kept(self, op: str, *parameters: str) -> None:
        """Check that parameters whose values a plan keeps were not given as meta tensors.

        Raises:
            InvalidArgument: one of the parameters was given as a meta tensor.
        """
        for parameter in parameters:
            if parameter in self.shapes:
                raise InvalidArgument(
                    op, parameter, "is on meta", "the plan keeps its values: give a tensor with memory"
                )


class Op(Generic[ProblemT]):
    """Selection and tables of one op.

    Attributes:
        contract: contract of the op.
        function: the public function.
        traced: the function that torch.compile calls instead.
        table: by key, the bound function for calls without ``backend=`` and outside of `use` blocks.
        before: the kernel that was selected last, for ops whose functions ask it first.
        befores: the same of calls with features, by what the op's function makes of all arguments but tensors.
        layers: calls of engines' layers, by what these have in common; see `ops.layer_calls`.
        again: given all arguments of a call, makes it and returns its result, if it is like one before; else None. None
            where whole calls are not repeated; see `dispatch.whole_calls`.
    """

    def __init__(self, contract: Contract[ProblemT]) -> None:
        self.contract = contract
        self.again: Callable[..., Any] | None = None
        self._calls: Any = None  # whose method `again` is
        self.function: Callable[..., Any]
        self.traced: Callable[..., Any]
        self.table: dict[Key, Run] = {}
        self.before: Before | None = None
        self.befores: dict[Hashable, Before] = {}
        self.layers: dict[Hashable, Any] = {}
        self._overrides: dict[tuple[Backend, Layers, Key], Run] = {}
        self._bound: dict[Request, Bound] = {}  # without ``backend=`` and contexts
        self._bound_otherwise: dict[Request, Bound] = {}  # with one of them
        self._prepared: dict[Key, dict[str, Any]] = {}  # forms of the arguments that plans were prepared with
        HUB.on_change(self._forget)
        HUB.on_launcher(self._repeat)
        HUB.on_loss(self._forget_device)

    def override(self, key: Key, backend: Backend | DryRun) -> Run | None:
        """The bound function for a call with ``backend=`` or inside a `use` block; None if there is none yet."""
        if type(backend) is list:
            backend = tuple(backend)
        try:
            return self._overrides.get((cast(Backend, backend), HUB.contexts.get(), key))
        except TypeError:  # one of the two is unhashable; the op's checks report other parts of the key
            requested_names(self.contract.name, backend.backend if isinstance(backend, DryRun) else backend)
            raise

    def decide(self, key: Key, device: int, backend: Backend | DryRun) -> Run:
        """Select and bind the function for a new key, and store it. The op has checked its arguments.

        Args:
            key: the call's key.
            device: index of the operands' GPU, -1 for the CPU, as `Tensor.get_device` gives it.
            backend: the call's ``backend=``.
        """
        if isinstance(backend, DryRun):
            return lambda *arguments: ParsedCall(key, device, tuple(map(python_value, arguments)))
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
        """The bound selection for a key on one device; a kernel that is made of ops has their problems as keys.

        Raises:
            NotWarmed: there is none yet, and kernelhub is sealed.
            DeviceLost: the device is lost.
        """
        if GATE.lost:
            GATE.check_device(device)
        request = Request(requested_names(self.contract.name, backend), HUB.contexts.get(), key, device)
        table = self._bound_otherwise if request.backend is not None or request.contexts else self._bound
        bound = table.get(request)
        if bound is not None:
            return bound
        _ = HUB.settings
        op = self.contract.name
        problem = key if isinstance(key, self.contract.problem) else self.contract.problem_of(key, device)
        if GATE.refuse is not None:
            for other, made in self._requests():  # another key may give the same problem
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
                    return  # outdated: it serves only this call
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
        """The problems with a bound selection, oldest first."""
        return tuple(dict.fromkeys(bound.selection.problem for _, bound in self._requests()))

    def _requests(self) -> list[tuple[Request, Bound]]:
        return [*self._bound.items(), *self._bound_otherwise.items()]

    def forms_of(self, key: Key, bound: Bound | None) -> dict[str, Any]:
        """Forms of the arguments of `prepare` for a key, or without a key for any key of `bound`; empty if unknown."""
        keys = [key] if key is not None else [request.key for request, other in self._requests() if other is bound]
        return next((self._prepared[key] for key in keys if key in self._prepared), {})

    def parse(self, backend: Backend, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ParsedCall:
        """The `ParsedCall` of these arguments. Meta tensors count as tensors with unknown values."""
        if type(backend) is list:
            backend = tuple(backend)
        shapes: frozenset[str] = frozenset()
        with standing_in(self.function, args, kwargs) as stand_ins, parsing():
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
        """The selection for a problem. No adapter is imported.

        Args:
            problem: the problem.
            backend: the call's ``backend=``.
            machine: facts of another machine; by default this one.
            packing: checkpoint weights will be packed for the selected kernel.
            barred: further rejections, by kernel.
        """
        return HUB.select_as_called(self.contract.name, problem, backend, machine, packing=packing, barred=barred)

    def no_kernel(self, selection: Selection[ProblemT], backend: Backend) -> NoKernel:
        """The error of a selection without a kernel."""
        return no_kernel(selection, self.policy(backend).about(selection.problem, HUB.machine))

    def ranked(self, problem: ProblemT, backend: Backend) -> Sequence[Kernel]:
        """The kernels that requests leave, best first, supported or not."""
        return HUB.ranked(self.contract.name, problem, self.policy(backend))

    def policy(self, backend: Backend) -> Policy:
        """The current policy for the op."""
        return HUB.policy(self.contract.name, requested_names(self.contract.name, backend), HUB.contexts.get())

    def kernels(self) -> tuple[str, ...]:
        """Names of every registered kernel, sorted."""
        _ = HUB.settings
        return tuple(sorted(kernel.name for kernel in HUB.registry.candidates(self.contract.name).kernels))

    @functools.cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the public function's parameters."""
        return tuple(inspect.signature(self.function).parameters)

    @property
    def calls(self) -> Any:
        """`Calls` of the extension, whose method `again` is; None before the launcher is loaded."""
        return self._calls

    def _repeat(self) -> None:
        """Let the launcher's extension make whole calls from now on."""

        def call(*arguments: Any) -> Any:
            return self.function(**dict(zip(self.parameters, arguments, strict=True)))

        self._forget_layers()  # which belong to `Calls` of before; `before` stays, since it may be of the first call
        self._calls = calls_of(call, HUB.contexts_used)
        self.again = self._calls.again

    def _forget_calls(self) -> None:
        self.before = None
        self.befores.clear()
        self._forget_layers()
        if self._calls is not None:
            self._calls.clear()

    def _forget_layers(self) -> None:
        for calls in self.layers.values():
            calls.clear()

    def _forget(self) -> None:
        self._forget_calls()
        self.table.clear()
        self._overrides.clear()
        self._bound.clear()
        self._bound_otherwise.clear()
        self._prepared.clear()

    def _forget_device(self, device: int) -> None:
        """Remove the device's functions from the tables. Its next call reaches `bound_for`, which raises DeviceLost."""
        self._forget_calls()
        runs = {id(bound.run) for request, bound in self._requests() if request.device == device}
        for key in [key for key, run in self.table.items() if id(run) in runs]:
            del self.table[key]
        for request in [request for request, run in self._overrides.items() if id(run) in runs]:
            del self._overrides[request]


def device_of(index: int) -> torch.device:
    """The torch device of a device index, -1 for the CPU."""
    return torch.device("cpu") if index < 0 else torch.device("cuda", index)


class OpFunction(Protocol[P, R, PlanT]):
    """A public op: a function with the attributes `prepare`, `explain`, `kernels` and `reference`."""

    __name__: str
    __doc__: str | None
    op: Op[Any]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    @overload
    def prepare(self, *args: P.args, **kwargs: P.kwargs) -> PlanT:
        """Select once for arguments like these, and return a plan; see `kernelhub.dispatch.plan`.

        Tensors may be meta tensors, of which only shapes, strides and dtypes matter (`kernelhub.dispatch.shapes`).
        """

    @overload
    def prepare(self, *args: Any, packing: bool, **kwargs: Any) -> PlanT:
        """`prepare` of an op whose weights can be packed; see `kernelhub.ops.packed`."""

    def explain(self, *args: Any, **kwargs: Any) -> Selection[Any]:
        """The selection for arguments like these; see `kernelhub.explain`."""

    def kernels(self) -> tuple[str, ...]:
        """Names of every registered kernel, sorted."""

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """The op in plain torch."""
