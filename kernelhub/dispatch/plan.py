"""A plan is a selection bound and ready: `plan.run(...)` is a plain call.

Selection is static: once per layer configuration. An op's own plan class adds `begin`, the metadata of
one engine step, shared by all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import GraphLevel
from kernelhub.dispatch.selection import Selection

_Call = TypeVar("_Call", bound=Callable[..., Any])


def traced_as(run: _Call, traced: Callable[..., Any]) -> _Call:
    """`run`, which torch.compile replaces by `traced`.

    The attribute is the one that torch's own wrappers carry for it. Unlike a test of `is_compiling` it costs an
    eager call nothing.
    """
    run._torchdynamo_inline = traced  # type: ignore[attr-defined]
    return run


class Plan:
    """What all plans have in common.

    Attributes:
        selection: the selection that the plan was made from.
        run: the call; its arguments are said by the op's plan class.
        adapter: the chosen kernel's adapter, made for the problem.
        bound: the selection made ready.
        weights: parameters of `run` that keep the values which the plan was prepared with, if a run is given none.
    """

    weights: ClassVar[tuple[str, ...]] = ()
    __slots__ = ("__weakref__", "adapter", "bound", "run", "selection")

    def __init__(self, bound: Bound, run: Callable[..., Any]) -> None:
        self.bound = bound
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
        """What may be captured in a CUDA graph."""
        assert self.selection.kernel is not None
        return self.selection.kernel.graph

    @property
    def reads_lengths(self) -> bool:
        """Whether a step needs sequence lengths on the host, and syncs if they are not given."""
        assert self.selection.kernel is not None
        return self.selection.kernel.reads_lengths

    @property
    def syncs(self) -> bool:
        """Whether `begin` waits for the device where host lengths are not given. With them it never does."""
        return self.reads_lengths and self.selection.problem.device.type != "cpu"

    def workspace_bytes(self, **sizes: int) -> int:
        """Device memory beyond operands and result that runs within these sizes take, at most.

        Args:
            sizes: as of the adapter of the op; for attention ``num_seqs``, ``num_tokens``, ``max_kv_len``.
        """
        num_bytes: int = self.adapter.workspace_bytes(**sizes)
        return num_bytes

    @property
    def fingerprint(self) -> str:
        """Equal for equal choices, in every process: see `dispatch.fingerprint`."""
        return str(HUB.fingerprint_of(self.selection))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.kernel} {self.fingerprint}>"
