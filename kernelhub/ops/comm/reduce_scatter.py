"""`reduce_scatter`: the sum of a tensor over the ranks of a process group, of which each rank gets its part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.op import Backend, DryRun, Op
from kernelhub.dispatch.plan import publish
from kernelhub.errors import InvalidArgument, KernelhubError
from kernelhub.ops.arguments import refuse
from kernelhub.ops.comm.adapter import ReduceScatterAdapter
from kernelhub.ops.comm.group import resolved
from kernelhub.ops.comm.keys import from_keys
from kernelhub.ops.comm.preparing import CollectivePlan, prepare
from kernelhub.ops.comm.problem import REDUCE_SCATTER, ReduceScatterProblem
from kernelhub.ops.comm.reference import reduce_scatter_reference
from kernelhub.ops.comm.refusing import inform
from kernelhub.ops.comm.sums import binds, check_summed, summed
from kernelhub.ops.comm.topology import connection
from kernelhub.ops.operands import check_destination
from kernelhub.ops.operators import Traced

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAME = "reduce_scatter"


def check(x: Any, group: Any, out: Any) -> ProcessGroup:
    """Everything that the contract says of a call; returns the group."""
    check_summed(NAME, x)
    pg = resolved(NAME, group)
    if not x.ndim or x.shape[0] % pg.size():
        refuse(NAME, "x", f"has shape {list(x.shape)}", f"give rows that {pg.size()} ranks divide")
    if out is not None:
        shape = (x.shape[0] // pg.size(), *x.shape[1:])
        check_destination(NAME, "out", out, shape, x.dtype, x.device, {"x": x})
    return pg


_op: Op[ReduceScatterProblem] = Op(
    Contract.of(
        REDUCE_SCATTER,
        problem_of=from_keys(ReduceScatterProblem),
        adapter=ReduceScatterAdapter,
        bind=binds(NAME, check, in_parts=True),
        reference=reduce_scatter_reference,
        example="kernelhub.ops.comm.inputs:reduce_scatter_inputs",
    )
)
_get = _op.table.get
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class ReduceScatterPlan(CollectivePlan):
    """Kernels selected for a group: ``run(x, out=None)``, for any number of rows that the ranks divide.

    Every rank gives it the same shape. A run switches between kernels by the bytes of `x`.
    """

    __slots__ = ()
    call = "x, group, out"


def _prepare(*args: Any, backend: Backend = None, **kwargs: Any) -> ReduceScatterPlan:
    """Select once for arguments like these, compare the selection with those of the other ranks, and connect to them.

    All ranks of the group call it, in the same order. Arguments as of `reduce_scatter`.

    Raises:
        RanksDisagree: a rank gives another shape or dtype, selects another kernel, fails, or is missing after
            KERNELHUB_COMM_TIMEOUT_S.
    """
    return prepare(_op, ReduceScatterPlan, backend, args, kwargs, lambda parsed: summed(parsed.arguments[0]))


_prepare.__annotations__["return"] = ReduceScatterPlan


def _memory(x: Tensor, group: str, **others: Any) -> dict[str, Tensor]:
    return {"out": x.new_empty(x.shape[0] // resolved(NAME, group).size(), *x.shape[1:])}


@publish(_op, _prepare, traced=Traced(_memory))
def reduce_scatter(
    x: Tensor,
    group: torch.distributed.ProcessGroup | str,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """Sum a tensor over the ranks of a process group, and give each rank its part of the rows.

    Every rank of the group calls it, with the same shape and dtype. Rank r gets rows ``r * N / W`` to
    ``(r + 1) * N / W`` of the sum, for N rows and W ranks. `all_gather` of the results gives the whole sum.

    `reduce_scatter.prepare` compares shape, dtype and kernel of all ranks, and names a rank that differs or is missing.
    A direct call and `plan.run` compare shape and dtype on a CPU, the kernel too with KERNELHUB_CHECK=1, and nothing on
    a GPU without it.

    Args:
        x: ``[N, ...]`` in float32, float16 or bfloat16; the ranks must divide N, which may be 0.
        group: a process group of torch.distributed that this process is in, or its registered `group_name`.
        out: destination, ``[N / W, ...]``. It must not overlap `x`.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        ``[N / W, ...]`` in the dtype of `x`.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.
        RanksDisagree: on a CPU, or with KERNELHUB_CHECK=1, a rank calls something else, or is refused; on every
            rank, before data is sent.
        RuntimeError: on a CPU, a rank is dead, or did not join within KERNELHUB_COMM_TIMEOUT_S; the message names it.
            The group cannot be used any more.

    Source:
        `torch.distributed.reduce_scatter_tensor`, whose result this is.

    Example:
        >>> import torch, kernelhub
        >>> from kernelhub.ops.comm.inputs import alone
        >>> x = torch.arange(4.0)
        >>> torch.equal(kernelhub.reduce_scatter(x, alone(x.device)), x)
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
