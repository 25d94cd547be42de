"""Plans whose `run` is a whole call: `run` and its traced form are generated from the op's public signature."""

from __future__ import annotations

import functools
import inspect
import linecache
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.op import Backend, Op
from kernelhub.dispatch.plan import Plan, traced_as

Fixed = Mapping[str, Callable[[Any], Any]]  # parameter -> its value, of the problem
PlanT = TypeVar("PlanT", bound="CallPlan")


class CallPlan(Plan):
    """A plan whose `run` takes the op's arguments but ``backend`` and those that the plan fixes.

    Attributes:
        call: the arguments of the bound function, as the op's public function passes them.
        fixed: parameters that the problem fixes, with their values for traced code.
        kept: parameters of `call` that keep the value which the plan was prepared with.
    """

    __slots__ = ()
    call: ClassVar[str]
    fixed: ClassVar[Fixed] = {}
    kept: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        op: Op[Any],
        bound: Bound,
        arguments: tuple[Any, ...] = (),
        *,
        kept: Mapping[str, Any] | None = None,
        run: Callable[..., Any] | None = None,
    ) -> None:
        """Arguments:

        op: the op.
        bound: the selection made ready.
        arguments: of the bound function, as the plan was prepared with them.
        kept: more parameters that keep a value, which `call` does not name.
        run: what is called in place of the bound function.
        """
        problem, order = bound.selection.problem, self.call.split(", ")
        values = {name: of(problem) for name, of in self.fixed.items()}
        values |= {name: arguments[order.index(name)] for name in self.kept}
        values |= kept or {}
        make = _written(op.function, self.call, tuple(values))
        run, traced = make(run or bound.run, op.function, bound.selection.selected, **values)
        run.__qualname__ = f"{op.contract.name}.run"
        super().__init__(bound, traced_as(run, traced))


def prepares(op: Op[Any], plan: type[PlanT]) -> Callable[..., PlanT]:
    """The `prepare` of an op whose plans are of this class."""

    def prepare(*args: Any, backend: Backend = None, **kwargs: Any) -> PlanT:
        asked = op.ask(backend, args, kwargs)
        return plan(op, op.bound_for(asked.key, asked.device, backend), asked.arguments)

    prepare.__annotations__["return"] = plan
    prepare.__doc__ = f"Select once for arguments like these: arguments as of `{op.contract.name}`."
    return prepare


@functools.cache
def _written(function: Callable[..., Any], call: str, fixed: tuple[str, ...]) -> Callable[..., Any]:
    """The function that makes `run` and `traced` of a plan. Tracebacks show its lines."""
    all_of = [item for item in inspect.signature(function).parameters.values() if item.name != "backend"]
    open_ = [item for item in all_of if item.name not in fixed]
    head = ", ".join(
        item.name if item.default is item.empty else f"{item.name}={_literal(item.default)}" for item in open_
    )
    passed = ", ".join(f"{item.name}={item.name}" for item in all_of)
    source = (
        f"def make({', '.join(('bound_run', 'op', 'kernel', *fixed))}):\n"
        f"    def run({head}):\n"
        f"        return bound_run({call})\n"
        "\n"
        f"    def traced({head}):\n"
        f"        return op({passed}, backend=kernel)\n"
        "\n"
        "    return run, traced\n"
    )
    name = f"<plan of {function.__name__}>"
    made: dict[str, Any] = {"__name__": __name__}  # by which `runtime.lines` finds the plan's own frame
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), made)
    make: Callable[..., Any] = made["make"]
    return make


def _literal(default: Any) -> str:
    """A default as Python reads it."""
    assert default is None or isinstance(default, bool | int | float | str), default
    return repr(default)
