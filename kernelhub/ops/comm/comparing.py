"""With KERNELHUB_CHECK=1 the ranks of a group compare each call before they launch it, on GPUs too.

Without it a call on a GPU compares nothing: ranks that differ there wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelhub.dispatch.hub import HUB
from kernelhub.ops.comm.group import meet
from kernelhub.ops.values import checks_devices

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Comparing:
    """What compares the calls of one bound kernel with those of the other ranks, through the store of the group."""

    __slots__ = ("_adapter", "_op", "_timeout_s")

    def __init__(self, op: str, adapter: Any, timeout_s: float) -> None:
        self._op, self._adapter, self._timeout_s = op, adapter, timeout_s

    def __call__(self, group: ProcessGroup, statement: Mapping[str, Any]) -> None:
        """Compare a call. Every rank calls it before its launch, also under the capture of a graph.

        Args:
            group: the group.
            statement: plain values that must be equal on all ranks, beside the op and the kernel.

        Raises:
            RanksDisagree: a rank is missing, or calls something else; on every rank that called.
        """
        bound = HUB.ledger.bound_of(self._adapter)
        kernel = "" if bound is None else str(bound.selection.selected)
        meet(self._op, group, {"op": self._op, "kernel": kernel, **statement}, self._timeout_s, of_call=True)


def comparing(op: str, adapter: Any, timeout_s: float) -> Comparing | None:
    """What compares the calls of a bound kernel; None without KERNELHUB_CHECK=1.

    Args:
        op: name of the op.
        adapter: that of the kernel.
        timeout_s: longest wait for the other ranks.
    """
    return Comparing(op, adapter, timeout_s) if checks_devices() else None
