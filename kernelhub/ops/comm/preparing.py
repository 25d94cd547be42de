"""`prepare` of the collectives: all ranks learn how they are connected, select, compare, and connect.

Each step is collective. A rank that fails in a step informs the others, so that every rank raises an error and none
waits.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.op import Backend, Op, ParsedCall
from kernelhub.dispatch.selection import Selection
from kernelhub.errors import InvalidArgument, KernelhubError, RanksDisagree
from kernelhub.ops.call_plan import CallPlan
from kernelhub.ops.comm.group import libraries_of, meet, resolved
from kernelhub.ops.comm.problem import ANY, BUCKETS, MESSAGE_BYTES, NVLINK, PCIE
from kernelhub.ops.comm.refusing import informing
from kernelhub.ops.comm.topology import GroupFacts, learn

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

TIMEOUT = "KERNELHUB_COMM_TIMEOUT_S"
_BOUNDS = tuple(MESSAGE_BYTES.values())
PlanT = TypeVar("PlanT", bound="CollectivePlan")


class CollectivePlan(CallPlan):
    """Kernels selected for a group: one for each bucket of messages, between which a run switches.

    Attributes:
        kernels: the kernels by bucket; ``any`` where the group has none that depends on the message.
        parts: for each of these buckets, the selections of the ops that its kernel is made of; none of kernels of
            their own.
        connection: how the ranks are connected, and how that was found.
    """

    __slots__ = ("connection", "kernels", "parts")
    repeats_without = kept = ("group",)
    kernels: Mapping[str, str]
    parts: Mapping[str, tuple[Selection[Any], ...]]
    connection: GroupFacts

    def __init__(
        self, op: Op[Any], bounds: Mapping[str, Bound], message: str, parsed: ParsedCall, facts: GroupFacts
    ) -> None:
        bound = bounds[message]
        kernels = {name: str(item.selection.selected) for name, item in bounds.items()}
        names = tuple(dict.fromkeys((kernels[message], *kernels.values())))
        run = bound.run if len(bounds) == 1 else _switching([bounds[name].run for name in BUCKETS], self.message_bytes)
        run = informing(op.contract.name, run, self.call.split(", ").index("group"), parsed.arguments[0])
        super().__init__(op, bound, parsed, run=run, backend=names if len(names) > 1 else names[0])
        self.kernels, self.connection = kernels, facts
        made_of = {name: item.adapter.made_of(parsed.device) for name, item in bounds.items()}
        self.parts = {name: tuple(part.selection for part in parts) for name, parts in made_of.items() if parts}

    @property
    def said(self) -> str:
        """The kernels and their parts, in words that are equal on ranks which run the same."""
        words = dict(self.kernels)
        for name, parts in self.parts.items():
            words[name] += f" ({', '.join(f'{part.op} by {part.selected}' for part in parts)})"
        return ", ".join(words.values() if len(words) == 1 else (f"{name}: {said}" for name, said in words.items()))

    @staticmethod
    def message_bytes(x: Tensor, *arguments: Any) -> int:
        """Bytes of the message of a call, equal on all ranks."""
        return x.nbytes


def _switching(runs: list[Callable[..., Any]], message_bytes: Callable[..., int]) -> Callable[..., Any]:
    """The function that runs the kernel of a message's bucket."""
    find, bounds, first = bisect.bisect_left, _BOUNDS, runs[0]

    def run(*arguments: Any) -> Any:
        try:
            place = find(bounds, message_bytes(*arguments))
        except (AttributeError, TypeError, RuntimeError):  # what is no tensor is refused with its name
            return first(*arguments)
        return runs[place](*arguments)

    return run


def prepare(
    op: Op[Any],
    plan: type[PlanT],
    backend: Backend,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    state: Callable[[ParsedCall], Mapping[str, Any]],
) -> PlanT:
    """A plan that all ranks of a group prepare together.

    Args:
        op: the op. Its keys end with the facets `link`, `peers` and `message`.
        plan: class of the plan.
        backend, args, kwargs: arguments of the call.
        state: what of the call must be equal on all ranks, as plain values.
    """
    name, timeout_s = op.contract.name, HUB.settings[TIMEOUT]
    try:
        parsed = op.parse(backend, args, kwargs)
        x, pg = parsed.arguments[0], _group(plan, parsed)
        facts = learn(name, pg, x.device, timeout_s)
        bounds, message = _select(op, plan, backend, parsed, facts)
        made = plan(op, bounds, message, parsed, facts)
    except RanksDisagree:
        raise  # all ranks have it
    except KernelhubError as error:
        _give_up(name, op, error, timeout_s, args, kwargs)
        raise
    parts = [part.kernel for parts in made.parts.values() for part in parts]
    libraries = libraries_of([*(bound.selection.kernel for bound in bounds.values()), *parts])
    meet(name, pg, {"op": name, "kernel": made.said, "libraries": libraries, **state(parsed)}, timeout_s)
    try:
        for bucket in reversed(list(bounds)):  # the largest workspace first
            bounds[bucket].adapter.connect(x, pg, timeout_s)
    except RanksDisagree:
        raise
    except Exception as error:
        _tell(name, pg, error, timeout_s)
        raise
    meet(name, pg, {"op": name, "step": "connected"}, timeout_s)
    return made


def _group(plan: type[CollectivePlan], parsed: ParsedCall) -> ProcessGroup:
    return resolved("", parsed.arguments[plan.call.split(", ").index("group")])


def _select(
    op: Op[Any], plan: type[CollectivePlan], backend: Backend, parsed: ParsedCall, facts: GroupFacts
) -> tuple[dict[str, Bound], str]:
    """The bound selection of each bucket, and the bucket of the call."""
    head: tuple[Any, ...] = parsed.key[:-3]  # type: ignore[index]
    several = facts.link in (NVLINK, PCIE)
    messages = BUCKETS if several else (ANY,)
    keys = {message: (*head, facts.link, facts.peers, message) for message in messages}
    bounds = {message: op.bound_for(key, parsed.device, backend) for message, key in keys.items()}
    size = plan.message_bytes(*parsed.arguments)
    return bounds, BUCKETS[bisect.bisect_left(_BOUNDS, size)] if several else ANY


def _give_up(
    name: str, op: Op[Any], error: KernelhubError, timeout_s: float, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Inform the other ranks that this rank cannot run, so that they do not wait for it."""
    import inspect

    try:
        given = inspect.signature(op.function).bind_partial(*args, **kwargs).arguments
        pg = resolved(name, given.get("group"))
    except (InvalidArgument, TypeError):
        return
    _tell(name, pg, error, timeout_s)


def _tell(name: str, group: ProcessGroup, error: Exception, timeout_s: float) -> None:
    """Post an error as this rank's part of the step that the others are in, or come to."""
    try:
        meet(name, group, {"op": name, "error": str(error)}, timeout_s)
    except KernelhubError:
        return
