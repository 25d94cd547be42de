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

import inspect
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast, overload

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
Place = tuple[Names | None, Layers, Key, int]  # ``backend=``, contexts, key, device: what a choice is made for


@dataclass(frozen=True)
class Ask:
    """Passed as ``backend=`` it makes an op check its arguments and answer with its key instead of running.

    So `prepare` and `explain` read a call exactly as the call itself would be read.
    """

    backend: Backend


@dataclass(frozen=True)
class Asked:
    """What an op answers to `Ask`: key, device index, and the arguments as its `run` would get them.

    Attributes:
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
        self._bound: dict[Place, Bound] = {}  # where neither the call nor a context says otherwise
        self._bound_otherwise: dict[Place, Bound] = {}
        self._asked: dict[Key, dict[str, Any]] = {}  # forms of the arguments that plans were prepared with
        HUB.on_change(self._forget)

    def override(self, key: Key, backend: Backend | Ask) -> Run | None:
        """The function to run where the call or a context says what it wants; None if not yet decided."""
        if type(backend) is list:
            backend = tuple(backend)
        try:
            return self._overrides.get((cast(Backend, backend), HUB.contexts.get(), key))
        except TypeError:  # it cannot be a key: say so by name
            names_asked_for(cast(Backend, backend))
            raise

    def decide(self, key: Key, device: int, backend: Backend | Ask) -> Run:
        """The function to run for a key that is new; the op has checked its arguments.

        Args:
            key: the call's key.
            device: index of the operands' GPU, -1 for the CPU, as `Tensor.get_device` gives it.
            backend: the call's ``backend=``.
        """
        if isinstance(backend, Ask):
            return lambda *arguments: Asked(key, device, arguments)
        if type(backend) is list:
            backend = tuple(backend)
        contexts = HUB.contexts.get()
        generation = HUB.generation
        bound = self.bound_for(key, device, backend)
        with HUB.lock:
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
        contexts = HUB.contexts.get()
        names = names_asked_for(backend)
        place = (names, contexts, key, device)
        table = self._bound if names is None and not contexts else self._bound_otherwise
        bound = table.get(place)
        if bound is not None:
            return bound
        _ = HUB.settings
        while True:
            generation = HUB.generation
            try:
                return self._commit(place, table, backend, generation)
            except Outdated:
                continue

    def _commit(self, place: Place, table: dict[Place, Bound], backend: Backend, generation: int) -> Bound:
        names, contexts, key, device = place
        op, problem = self.contract.name, self.contract.problem_of(key, device)
        if GATE.refuse is not None:
            for said, layers, _, index, other in self._decided():  # another key may mean the same
                if (said, layers, index) == (names, contexts, device) and other.selection.problem == problem:
                    return other
            raise GATE.refuse("decide", "which kernel runs", Caller(op, "", problem, key, sys._getframe(1)))
        policy = HUB.policy(op, names, contexts)

        def elsewhere(other: int) -> Run:
            return self.bound_for(key, other, backend).run

        def remember(bound: Bound) -> None:
            with HUB.lock:
                if GATE.lost:
                    GATE.check_device(device)
                if generation != HUB.generation:
                    return  # it serves this call
                if table is self._bound:
                    table[place] = bound
                else:
                    keep(table, place, bound)

        return HUB.commit(op, problem, policy, device, elsewhere, generation, lambda: table.get(place), remember)

    def ready(self) -> tuple[ProblemT, ...]:
        """The problems that were decided and made ready, oldest first."""
        return tuple(dict.fromkeys(bound.selection.problem for *_, bound in self._decided()))

    def _decided(self) -> list[tuple[Names | None, Layers, Key, int, Bound]]:
        return [(*place, bound) for place, bound in (*list(self._bound.items()), *list(self._bound_otherwise.items()))]

    def forms_of(self, key: Key, bound: Bound | None) -> dict[str, Any]:
        """Forms of the arguments that `prepare` was called with for a key, or for one of those that are bound so."""
        keys = [key] if key is not None else [k for *_, k, _, other in self._decided() if other is bound]
        return next((self._asked[key] for key in keys if key in self._asked), {})

    def ask(self, backend: Backend, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Asked:
        """How the op's function reads these arguments; meta tensors are read as tensors of unknown values."""
        if type(backend) is list:
            backend = tuple(backend)
        shapes: frozenset[str] = frozenset()
        with standing_in(self.function, args, kwargs) as stand_ins:
            if stand_ins is not None:
                args, kwargs, shapes = (), stand_ins.arguments, stand_ins.parameters
            asked: Asked = self.function(*args, **kwargs, backend=Ask(backend))
        if asked.key not in self._asked:
            given = inspect.signature(self.function).bind(*args, **kwargs).arguments
            if backend is not None:
                given["backend"] = backend
            self._asked[asked.key] = written(given, device_of(asked.device))
        return replace(asked, shapes=shapes) if shapes else asked

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
        return HUB.select_as_asked(self.contract.name, problem, backend, machine, packing=packing, barred=barred)

    def no_kernel(self, selection: Selection[ProblemT], backend: Backend) -> NoKernel:
        """The error that nothing may run what a selection found no kernel for."""
        return no_kernel(selection, self.policy(backend).about(selection.problem, HUB.machine))

    def ranked(self, problem: ProblemT, backend: Backend) -> Sequence[Kernel]:
        """The kernels that may run, best first, whether or not they can run this."""
        return HUB.ranked(self.contract.name, problem, self.policy(backend))

    def policy(self, backend: Backend) -> Policy:
        """What the user said about the op, here and now."""
        return HUB.policy(self.contract.name, names_asked_for(backend), HUB.contexts.get())

    def kernels(self) -> tuple[str, ...]:
        """Names of every registered kernel, sorted."""
        _ = HUB.settings
        return tuple(sorted(kernel.name for kernel in HUB.registry.candidates(self.contract.name).kernels))

    def _forget(self) -> None:
        self.table.clear()
        self._overrides.clear()
        self._bound.clear()
        self._bound_otherwise.clear()
        self._asked.clear()


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
