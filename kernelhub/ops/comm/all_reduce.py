"""`all_reduce`: the sum of a tensor over the ranks of a process group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.op import Backend, DryRun, Op
from kernelhub.dispatch.plan import publish
from kernelhub.errors import InvalidArgument, KernelhubError
from kernelhub.ops.comm.adapter import AllReduceAdapter
from kernelhub.ops.comm.group import resolved
from kernelhub.ops.comm.keys import from_keys
from kernelhub.ops.comm.preparing import CollectivePlan, prepare
from kernelhub.ops.comm.problem import ALL_REDUCE, AllReduceProblem
from kernelhub.ops.comm.reference import all_reduce_reference
from kernelhub.ops.comm.refusing import inform
from kernelhub.ops.comm.sums import binds, check_summed, summed
from kernelhub.ops.comm.topology import connection
from kernelhub.ops.operands import check_destination
from kernelhub.ops.operators import Traced

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAME = "all_reduce"


def check(x: Any, group: Any, out: Any) -> ProcessGroup:
    """Everything that the contract says of a call; returns the group."""
    check_summed(NAME, x)
    pg = resolved(NAME, group)
    if out is not None:
        operands = {} if same_place(x, out) else {"x": x}
        check_destination(NAME, "out", out, x.shape, x.dtype, x.device, operands)
    return pg


def same_place(x: Tensor, out: Any) -> bool:
    """Whether each element of one tensor is that element of the other."""
    if out is x:
        return True
    dense = type(out) is Tensor and out.layout is torch.strided and not out.is_nested
    return dense and out.data_ptr() == x.data_ptr() and out.stride() == x.stride()


_op: Op[AllReduceProblem] = Op(
    Contract.of(
        ALL_REDUCE,
        problem_of=from_keys(AllReduceProblem),
        adapter=AllReduceAdapter,
        bind=binds(NAME, check, in_parts=False),
        reference=all_reduce_reference,
        example="kernelhub.ops.comm.inputs:all_reduce_inputs",
    )
)
_get = _op.table.get
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class AllReducePlan(CollectivePlan):
    """Kernels selected for a group: ``run(x, out=None)`` sums a tensor of the plan's dtype and any shape.

    Ranks compared kernels, dtype and shape when they prepared the plan. On a GPU a run compares them again with
    KERNELHUB_CHECK=1 only: every rank gives it the same shape. It switches between kernels by the bytes of `x`.
    """

    __slots__ = ()
    call = "x, group, out"


def _prepare(*args: Any, backend: Backend = None, **kwargs: Any) -> AllReducePlan:
    """Select once for arguments like these, compare the selection with those of the other ranks, and connect to them.

    All ranks of the group call it, in the same order. Arguments as of `all_reduce`.

    Raises:
        RanksDisagree: a rank gives another shape or dtype, selects another kernel, fails, or is missing after
            KERNELHUB_COMM_TIMEOUT_S.
    """
    return prepare(_op, AllReducePlan, backend, args, kwargs, lambda parsed: summed(parsed.arguments[0]))


_prepare.__annotations__["return"] = AllReducePlan


def _memory(x: Tensor, **others: Any) -> dict[str, Tensor]:
    return {"out": x.new_empty(x.shape)}


@publish(_op, _prepare, traced=Traced(_memory, in_place=("x",)))
def all_reduce(
    x: Tensor,
    group: torch.distributed.ProcessGroup | str,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """Sum a tensor over the ranks of a process group. Every rank of the group calls it, with the same shape and dtype.

    `all_reduce.prepare` compares shape, dtype and kernel of all ranks, and names a rank that differs or is missing. On
    a CPU, or with KERNELHUB_CHECK=1, a direct call and `plan.run` do so, too. Otherwise they compare nothing on a GPU:
    ranks that differ there make the backend of the group wait or fail.

    Args:
        x: any shape, also without elements, in float32, float16 or bfloat16.
        group: a process group of torch.distributed that this process is in, or its registered `group_name`.
        out: destination. It may be `x`, and must not overlap it otherwise.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        The sum in the shape and dtype of `x`.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.
        RanksDisagree: on a CPU, or with KERNELHUB_CHECK=1, a rank calls something else, or is refused; on every
            rank, before data is sent.
        RuntimeError: on a CPU, a rank is dead, or did not join within KERNELHUB_COMM_TIMEOUT_S; the message names it.
            The group cannot be used any more.

    Source:
        `torch.distributed.all_reduce`, whose sum this is.

    Example:
        >>> import torch, kernelhub
        >>> from kernelhub.ops.comm.inputs import alone
        >>> x = torch.arange(4.0)
        >>> torch.equal(kernelhub.all_reduce(x, alone(x.device)), x)
        True
    """
    if type(x) is not Tensor and isinstance(x, Tensor) and not isinstance(backend, DryRun):
        traced: Tensor = _op.traced(x, group, out, backend)
        return traced
    if _op.again is not None:
        again: Tensor | None = _op.again(x, group, out, backend)
        if again is not None:
            return again
    try:
        try:
            pg = resolved(NAME, group)
            key = (x.dtype, pg.size(), *connection(NAME, pg, x, x.nbytes))
        except (AttributeError, TypeError, RuntimeError, InvalidArgument):
            check(x, group, out)
            raise
        run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
        if run is None:
            check(x, group, out)
            run = _op.decide(key, x.get_device(), backend)
        result: Tensor = run(x, pg, out)
        return result
    except KernelhubError as error:
        inform(NAME, error, x, group, backend)
        raise
