"""How a function becomes the public face of an op."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from kernelhub.dispatch.explain import explain
from kernelhub.dispatch.op import Op, OpFunction
from kernelhub.dispatch.plan import traced_as

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
PlanT = TypeVar("PlanT", covariant=True)


def publish(
    op: Op[Any], prepare: Callable[..., PlanT], traced: Callable[..., Any]
) -> Callable[[Callable[P, R]], OpFunction[P, R, PlanT]]:
    """Make a function the public face of an op, with plans, verdicts and reference hanging on it.

    `traced`, of the same signature, is what torch.compile sees in its place.
    """

    def decorate(function: Callable[P, R]) -> OpFunction[P, R, PlanT]:
        public = cast(Any, traced_as(function, traced))
        op.function = function
        public.op = op
        public.prepare = prepare
        public.explain = functools.partial(explain, public)
        public.reference = op.contract.reference
        public.kernels = op.kernels
        return cast("OpFunction[P, R, PlanT]", public)

    return decorate
