"""`prepare` of collectives of experts: parse, compare with the other ranks, connect."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.op import Backend, Op
from kernelhub.errors import InvalidArgument, KernelhubError, RanksDisagree
from kernelhub.ops.call_plan import CallPlan
from kernelhub.ops.comm.group import libraries_of, meet, resolved
from kernelhub.ops.comm.topology import learn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PlanT = TypeVar("PlanT", bound=CallPlan)


def prepared(
    op: Op[Any],
    plan_type: type[PlanT],
    group_at: int,
    statement: Callable[..., Mapping[str, Any]],
    connect: Callable[[PlanT, ProcessGroup, float, tuple[Any, ...]], None],
    backend: Backend,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> PlanT:
    """A plan that all ranks of the group prepared alike.

    Args:
        op: the op.
        plan_type: class of the plan.
        group_at: index of the group among the op's arguments.
        statement: takes the arguments; returns what must be equal on all ranks, beside the kernel.
        connect: connects the plan's adapter to those of the other ranks.
        backend, args, kwargs: the call.

    Raises:
        RanksDisagree: see `kernelhub.ops.comm.group.meet`.
    """
    name, timeout_s = op.contract.name, HUB.settings["KERNELHUB_COMM_TIMEOUT_S"]
    try:
        parsed = op.parse(backend, args, kwargs)
        learn(name, resolved(name, parsed.arguments[group_at]), parsed.arguments[0].device, timeout_s)
        parsed = op.parse(backend, args, kwargs)  # its key has what was learned
        plan = plan_type(op, op.bound_for(parsed.key, parsed.device, backend), parsed)
        libraries = libraries_of([plan.selection.kernel])
        said = {"op": name, "kernel": plan.kernel, "libraries": libraries, **statement(*parsed.arguments)}
    except RanksDisagree:
        raise  # all ranks have it
    except KernelhubError as error:
        _give_up(op, error, timeout_s, args, kwargs)
        raise
    pg = resolved(name, parsed.arguments[group_at])
    meet(name, pg, said, timeout_s)
    try:
        connect(plan, pg, timeout_s, parsed.arguments)
    except RanksDisagree:
        raise  # all ranks have it
    except Exception as error:
        _tell(name, pg, error, timeout_s)
        raise
    meet(name, pg, {"op": name, "step": "connected"}, timeout_s)
    return plan


def _give_up(
    op: Op[Any], error: KernelhubError, timeout_s: float, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Inform the other ranks that this rank cannot run, so that they do not wait for it."""
    name = op.contract.name
    try:
        pg = resolved(name, inspect.signature(op.function).bind_partial(*args, **kwargs).arguments.get("group"))
    except (InvalidArgument, TypeError):
        return
    _tell(name, pg, error, timeout_s)


def _tell(name: str, group: ProcessGroup, error: Exception, timeout_s: float) -> None:
    """Post an error as this rank's part of the step that the others are in, or come to."""
    with contextlib.suppress(KernelhubError):  # the other ranks' errors; this rank raises its own
        meet(name, group, {"op": name, "error": str(error)}, timeout_s)
