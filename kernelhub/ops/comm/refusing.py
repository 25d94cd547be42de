"""A rank whose call is refused joins the comparison of the other ranks, so that all raise an error at once.

Ranks compare calls before they send anything on a CPU, and with KERNELHUB_CHECK=1. Without this they would wait for the
refused rank for KERNELHUB_COMM_TIMEOUT_S, after which a group on CPUs cannot be used any more. A rank that is refused
alone, while no other rank calls, waits for them as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lost import failed
from kernelhub.dispatch.op import Backend, DryRun
from kernelhub.errors import InvalidArgument, KernelhubError, RanksDisagree
from kernelhub.ops.comm.cpu_ranks import join_refused
from kernelhub.ops.comm.group import backend_kind, meet, resolved
from kernelhub.ops.comm.problem import USUAL
from kernelhub.ops.values import checks_devices

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CPU = torch.device("cpu")
_OF_LAUNCH = "of_launch"


def failed_launch(method: Any, error: Exception) -> None:
    """`failed`, of the launch of a collective: the other ranks may be past the comparison of this call."""
    error.__dict__[_OF_LAUNCH] = True
    failed(method, error)


def inform(op: str, error: KernelhubError, x: Any, group: Any, backend: Backend = None) -> None:
    """Have the other ranks raise that this one cannot make the call in which they are. The caller raises the error.

    Args:
        op: the op that this rank calls.
        error: why it cannot.
        x: the first operand, also if it is none.
        group: the argument of this name.
        backend: the same; a call that only selects informs nobody.
    """
    causes = (error, error.__cause__)
    if isinstance(error, RanksDisagree) or any(_OF_LAUNCH in getattr(one, "__dict__", ()) for one in causes):
        return
    if isinstance(backend, DryRun) or (isinstance(x, Tensor) and type(x) is not Tensor):
        return
    try:
        pg = resolved(op, group)
        if pg.size() == 1:
            return
        timeout_s = HUB.settings["KERNELHUB_COMM_TIMEOUT_S"]
        if checks_devices():
            meet(op, pg, {"op": op, "error": str(error)}, timeout_s, of_call=True)
        elif _compares_on_cpu(op, x, pg):
            join_refused(op, str(error), pg, timeout_s)
    except (KernelhubError, RuntimeError):
        # No such group, a rank that is dead, or what the other ranks raise: the error that the caller raises says more.
        return


def _compares_on_cpu(op: str, x: Any, group: ProcessGroup) -> bool:
    """Whether the other ranks compare the call by gloo. For what is no tensor: whether theirs can only be on a CPU."""
    on_cpu = x.is_cpu if isinstance(x, Tensor) else not torch.cuda.is_available()
    try:
        return on_cpu and backend_kind(op, group, _CPU) == USUAL
    except InvalidArgument:
        return False


def informing(op: str, call: Callable[..., Any], group_at: int, x: Any) -> Callable[..., Any]:
    """The run of a plan, which informs the other ranks where it is refused; itself where ranks compare nothing.

    Args:
        op: the op.
        call: takes the arguments of a whole call.
        group_at: the place of the group among them.
        x: the first operand that the plan was prepared with.
    """
    if not (checks_devices() or getattr(x, "is_cpu", False)):
        return call

    def run(*given: Any) -> Any:
        try:
            return call(*given)
        except KernelhubError as error:
            inform(op, error, given[0], given[group_at])
            raise

    return run
