"""`Plan`, the base class of plans, and the decorator that makes a function a public op.

A plan has a bound selection, so that `plan.run(...)` does not select. An engine prepares one plan for each layer
configuration. Plan classes of attention add `begin`, which takes the metadata of one engine step for all layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, ParamSpec, Protocol, TypeVar, cast, runtime_checkable

from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.explain import explain
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import GraphLevel
from kernelhub.dispatch.selection import Selection

if TYPE_CHECKING:
    from kernelhub.dispatch.op import Op, OpFunction

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
PlanT = TypeVar("PlanT", covariant=True)
_Call = TypeVar("_Call", bound=Callable[..., Any])


def traced_as(run: _Call, traced: Callable[..., Any]) -> _Call:
    """`run`, marked so that torch.compile replaces it by `traced`.

    torch's own wrappers use the same attribute. Unlike a test of `is_compiling`, it adds no cost to an eager call.
    """
    run._torchdynamo_inline = traced  # type: ignore[attr-defined]
    return run


class Plan:
    """Base class of plans, which `prepare` of an op returns.

    Attributes:
        selection: the `Selection` of the plan.
        run: the call; the op's plan class documents its arguments.
        adapter: adapter of the selected kernel, made for the problem.
        bound: the bound selection.
        keeps: parameters whose tensors of `prepare` each run reads.
        weights: parameters of `run` that default to the values given to `prepare`.
    """

    weights: ClassVar[tuple[str, ...]] = ()
    __slots__ = ("__weakref__", "adapter", "bound", "keeps", "run", "selection")

    def __init__(self, bound: Bound, run: Callable[..., Any], keeps: Sequence[str] = ()) -> None:
        self.bound = bound
        self.keeps = tuple(keeps)
        self.selection: Selection[Any] = bound.selection
        self.adapter: Any = bound.adapter
        self.run: Callable[..., Any] = run
        HUB.ledger.plans.add(self)

    @property
    def kernel(self) -> str:
        """Name of the kernel that runs."""
        assert self.selection.kernel is not None
        return self.selection.kernel.name

    @property
    def graph(self) -> GraphLevel:
        """Which steps may be captured in a CUDA graph."""
        assert self.selection.kernel is not None
        return self.selection.kernel.graph

    @property
    def reads_lengths(self) -> bool:
        """Whether `begin` needs sequence lengths on the host, and syncs if they are not given."""
        assert self.selection.kernel is not None
        return self.selection.kernel.reads_lengths

    @property
    def syncs(self) -> bool:
        """Whether `begin` waits for the device if host lengths are not given. With host lengths it never waits."""
        return self.reads_lengths and self.selection.problem.device.type != "cpu"

    def workspace_bytes(self, **sizes: int) -> int:
        """Maximum device memory, in bytes, of a run within these sizes, without operands and result.

        Args:
            sizes: sizes that the op's adapter class documents; for attention ``num_seqs``, ``num_tokens``,
                ``max_kv_len``.
        """
        num_bytes: int = self.adapter.workspace_bytes(**sizes)
        return num_bytes

    @property
    def fingerprint(self) -> str:
        """Text that is equal in two processes exactly if both run the same kernel; see `dispatch.fingerprint`."""
        return str(HUB.fingerprint_of(self.selection))

    def __copy__(self) -> Plan:
        return self

    def __deepcopy__(self, copied: dict[int, Any]) -> Plan:
        """Itself, as nothing of it changes: so that a module that has plans can be copied.

        Raises:
            TypeError: it keeps tensors. A copied module has its own, which this plan would not read.
        """
        if self.keeps:
            raise TypeError(f"{self!r} keeps {', '.join(self.keeps)}: prepare another plan for those of the copy")
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} belongs to this process: pickle its arguments, and prepare a plan there")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.kernel} {self.fingerprint}>"


@runtime_checkable
class Tracing(Protocol):
    """Makes from a function the one that torch.compile calls instead; see `kernelhub.ops.operators.Traced`."""

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]: ...


def publish(
    op: Op[Any], prepare: Callable[..., PlanT], traced: Tracing | Callable[..., Any]
) -> Callable[[Callable[P, R]], OpFunction[P, R, PlanT]]:
    """A decorator that makes a function an `OpFunction`: it attaches `prepare`, `explain`, `reference`, `kernels`.

    Args:
        op: the op.
        prepare: function that makes the op's plans.
        traced: the function that torch.compile calls instead, with the same signature, or a `Tracing` that makes it.
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
