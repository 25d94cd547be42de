"""How a function becomes the public face of an op."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, cast, runtime_checkable

from kernelhub.dispatch.explain import explain
from kernelhub.dispatch.op import Op, OpFunction
from kernelhub.dispatch.plan import traced_as

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
PlanT = TypeVar("PlanT", covariant=True)


@runtime_checkable
class Tracing(Protocol):
    """What makes the form of a function that traced code sees; see `kernelhub.ops.operators.Traced`."""

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]: ...


def publish(
    op: Op[Any], prepare: Callable[..., PlanT], traced: Tracing | Callable[..., Any]
) -> Callable[[Callable[P, R]], OpFunction[P, R, PlanT]]:
    """Make a function the public face of an op, with plans, explanations and reference attached to it.

    `traced` is what torch.compile sees in its place: of the same signature, or derived from it.
    """

    def decorate(function: Callable[P, R]) -> OpFunction[P, R, PlanT]:
        stand_in: Callable[..., Any] = traced.of(function) if isinstance(traced, Tracing) else traced
        public = cast(Any, traced_as(function, stand_in))
        op.function = function
        op.traced = stand_in
        public.op = op
        public.prepare = prepare
        public.explain = functools.partial(explain, public)
        public.reference = op.contract.reference
        public.kernels = op.kernels
        return cast("OpFunction[P, R, PlanT]", public)

    return decorate
