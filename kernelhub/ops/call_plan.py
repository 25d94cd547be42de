"""Plans whose `run` is a whole call: `run` and its traced form are generated from the op's public signature."""

from __future__ import annotations

import functools
import inspect
import linecache
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from textwrap import indent
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.op import Backend, Op, ParsedCall
from kernelhub.dispatch.plan import Plan, traced_as
from kernelhub.dispatch.whole_calls import Runs
from kernelhub.ops.arguments import NotPlain, refuse
from kernelhub.ops.packed import PackedWeight

Fixed = Mapping[str, Callable[[Any], Any]]  # parameter -> its value, of the problem
PlanT = TypeVar("PlanT", bound="CallPlan")


class CallPlan(Plan):
    """A plan whose `run` takes the op's arguments but ``backend`` and those that the plan fixes.

    Attributes:
        call: the arguments of the bound function, as the op's public function passes them.
        fixed: parameters that the problem fixes, with their values for traced code.
        repeats: whether the launcher's extension may make runs that come again from the arguments of `call`.
        repeats_but: a destination with which it is not asked; by default it always is.
        repeats_without: parameters that are `kept`, and that it is not given.
        kept: parameters of `call` that keep the value which the plan was prepared with.
        weights: parameters that keep it where a run is given none of them. Those that `call` does not name come last in
            `run`, and as one tuple behind the arguments of `call`.
    """

    __slots__ = ()
    call: ClassVar[str]
    fixed: ClassVar[Fixed] = {}
    repeats: ClassVar[bool] = True
    repeats_but: ClassVar[str] = ""
    repeats_without: ClassVar[tuple[str, ...]] = ()
    kept: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        op: Op[Any],
        bound: Bound,
        parsed: ParsedCall,
        *,
        run: Callable[..., Any] | None = None,
        values: Mapping[str, Any] | None = None,
        weights: Sequence[Any] | None = None,
        backend: Backend = None,
    ) -> None:
        """Arguments:

        op: the op.
        bound: the selection made ready.
        parsed: the request that the plan was prepared with.
        run: what takes the arguments of `call`; by default the bound function.
        values: parameters that `call` does not name, with the values that they keep.
        weights: values of `weights`; by default those of `parsed`.
        backend: what traced code passes as ``backend=``; by default the selected kernel.
        """
        problem, order, name = bound.selection.problem, self.call.split(", "), op.contract.name
        parsed.check_kept(name, *self.kept)
        fixed = {name: of(problem) for name, of in self.fixed.items()}
        fixed |= {name: parsed.arguments[order.index(name)] for name in self.kept} | dict(values or {})
        if not parsed.shapes.isdisjoint(self.weights):
            kept: tuple[Any, ...] = ()  # a shape has no values
        else:
            kept = tuple(weights or (parsed.arguments[order.index(part)] for part in self.weights))
        weights_of = _weights_of(name, self.weights, kept)
        again = ", ".join(name for name in order if name not in self.repeats_without) if self.repeats else ""
        make = _written(op.function, self.call, tuple(fixed), self.weights, again, self.repeats_but)
        called = run or bound.run
        given = (called, op.traced, backend or bound.selection.selected, kept, weights_of)
        runs = Runs(bound, _with_kept(called, [(order.index(name), fixed[name]) for name in self.repeats_without]))
        run, traced = make(*given, HUB, runs, **fixed)
        run.__qualname__ = f"{name}.run"
        held = fixed | (dict(zip(self.weights, kept, strict=True)) if kept else {})
        keeps = [name for name, value in held.items() if isinstance(value, Tensor | PackedWeight)]
        super().__init__(bound, traced_as(run, traced), keeps)


def prepares(op: Op[Any], plan: type[PlanT]) -> Callable[..., PlanT]:
    """The `prepare` of an op whose plans are of this class."""

    def prepare(*args: Any, backend: Backend = None, **kwargs: Any) -> PlanT:
        parsed = op.parse(backend, args, kwargs)
        return plan(op, op.bound_for(parsed.key, parsed.device, backend), parsed)

    prepare.__annotations__["return"] = plan
    prepare.__doc__ = f"Select once for arguments like these: arguments as of `{op.contract.name}`."
    return prepare


def _weights_of(op: str, names: Sequence[str], kept: tuple[Any, ...]) -> Callable[..., tuple[Any, ...]]:
    """The function that returns the weights of a run: those of its arguments, or those that the plan keeps."""

    def weights_of(*given: Any) -> tuple[Any, ...]:
        for name, weight in zip(names, given, strict=True):
            if weight is not None:
                if given[0] is None:
                    refuse(op, name, f"is given without {names[0]}", f"give all of {', '.join(names)}, or none")
                return given
        if not kept:
            refuse(op, names[0], "is missing", "the plan was prepared with its shape alone; give it to run")
        return kept

    return weights_of


def _with_kept(called: Callable[..., Any], kept: Sequence[tuple[int, Any]]) -> Callable[..., Any]:
    """A function that is given the others of its arguments, and keeps these at their places."""
    if not kept:
        return called

    def run(*given: Any) -> Any:
        arguments = list(given)
        for place, value in sorted(kept, key=itemgetter(0)):
            arguments.insert(place, value)
        return called(*arguments)

    return run


@functools.cache
def _written(
    function: Callable[..., Any], call: str, fixed: tuple[str, ...], weights: tuple[str, ...], again: str, given: str
) -> Callable[..., Any]:
    """The function that makes `run` and `traced` of a plan. Tracebacks show its lines.

    Args:
        function: of the op.
        call, weights: of the plan.
        fixed: parameters that have a value.
        again: what the launcher's extension is given first; empty if it makes no runs.
        given: a destination with which it is not asked; or empty.
    """
    all_of = [item for item in inspect.signature(function).parameters.values() if item.name != "backend"]
    beside = weights if weights and weights[0] not in call.split(", ") else ()
    open_ = [item for item in all_of if item.name not in (*fixed, *beside)]
    head = ", ".join(
        item.name
        if item.default is item.empty and item.name not in weights
        else f"{item.name}={None if item.name in weights else _literal(item.default)}"
        for item in open_
    )
    head += "".join(f", {name}=None" for name in beside)
    passed = ", ".join(f"{item.name}={item.name}" for item in all_of)
    names_of_run = [*(item.name for item in open_), *beside]
    names = ", ".join(weights)
    none = " is ".join(weights) + " is None"
    taken, launch = "", f"        return bound_run({call})\n"
    if again:
        without = f"{given} is None and " if given else ""
        asked = f"        if {without}hub.calls_of is not None and (done := runs.again({again})) is not None:\n"
        launch = f"{asked}            return done\n{launch}"
    if weights:
        taken = f"        if {weights[0]} is None:\n"
        taken += f"            {names} = kept if kept and {none} else weights_of({names})\n"
    if beside:
        launch = f"        if {none}:\n    {launch}"
        launch += f"        return bound_run({call}, weights_of({names}))\n"
    source = (
        f"def make({', '.join(('bound_run', 'op', 'kernel', 'kept', 'weights_of', 'hub', 'runs', *fixed))}):\n"
        f"    def run({head}):\n"
        "        try:\n"
        f"{indent('' if beside else taken, '    ')}{indent(launch, '    ')}"
        "        except NotPlain:\n"
        f"            return traced({', '.join(f'{name}={name}' for name in names_of_run)})\n"
        "\n"
        f"    def traced({head}):\n"
        f"{taken}"
        f"        return op({passed}, backend=kernel)\n"
        "\n"
        "    return run, traced\n"
    )
    name = f"<plan of {function.__name__}>"
    made: dict[str, Any] = {
        "NotPlain": NotPlain,
        "__name__": __name__,
    }  # by which `runtime.lines` finds the plan's own frame
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), made)
    make: Callable[..., Any] = made["make"]
    return make


def _literal(default: Any) -> str:
    """A default as Python reads it."""
    assert default is None or isinstance(default, bool | int | float | str), default
    return repr(default)
