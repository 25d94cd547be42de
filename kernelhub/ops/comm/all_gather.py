"""`all_gather`: the rows of all ranks of a process group, in the order of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.op import Backend, DryRun, Op
from kernelhub.dispatch.plan import publish
from kernelhub.errors import InvalidArgument, KernelhubError
from kernelhub.ops.arguments import check_wants_no_gradient, dense, describe, dtype_name, refuse
from kernelhub.ops.comm.adapter import AllGatherAdapter
from kernelhub.ops.comm.comparing import comparing
from kernelhub.ops.comm.group import resolved
from kernelhub.ops.comm.keys import from_keys
from kernelhub.ops.comm.known import GroupCalls, group_type, plain_operand, plain_place
from kernelhub.ops.comm.preparing import TIMEOUT, CollectivePlan, prepare
from kernelhub.ops.comm.problem import ALL_GATHER, MOVED, AllGatherProblem
from kernelhub.ops.comm.reference import all_gather_reference
from kernelhub.ops.comm.refusing import failed_launch, inform
from kernelhub.ops.comm.topology import connection
from kernelhub.ops.operands import check_count, check_destination, check_operand
from kernelhub.ops.operators import Traced

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAME = "all_gather"
_DTYPES = tuple(getattr(torch, name) for name in MOVED)


def check(x: Any, group: Any, out: Any, rows: Any) -> tuple[ProcessGroup, int]:
    """Everything that the contract says of a call; returns the group and the rows of the result."""
    check_operand(NAME, "x", x)
    if x.dtype not in _DTYPES:
        refuse(NAME, "x", f"has dtype {dtype_name(x.dtype)}", f"give {', '.join(MOVED)}")
    if not x.ndim:
        refuse(NAME, "x", "has shape []", "give at least one dimension")
    check_wants_no_gradient(NAME, "x", x)
    pg = resolved(NAME, group)
    if rows is None:
        total = x.shape[0] * pg.size()
    else:
        if not isinstance(rows, list | tuple) or len(rows) != pg.size():
            shown = f"has {len(rows)} counts" if isinstance(rows, list | tuple) else f"is {type(rows).__name__}"
            refuse(NAME, "rows", shown, f"give a list of {pg.size()} ints, the rows of each rank")
        counts = [check_count(NAME, f"rows[{rank}]", count) for rank, count in enumerate(rows)]
        if counts[pg.rank()] != x.shape[0]:
            refuse(NAME, "rows", f"has {counts[pg.rank()]} for this rank, {pg.rank()}", f"x has {x.shape[0]} rows")
        total = sum(counts)
    if out is not None:
        check_destination(NAME, "out", out, (total, *x.shape[1:]), x.dtype, x.device, {"x": x})
    return pg, total


def message_bytes(x: Tensor, rows: Sequence[int] | None) -> int:
    """Bytes of the largest message of a rank."""
    if rows is None:
        return x.nbytes
    return max(rows, default=0) * x.shape[1:].numel() * x.itemsize


def gathered(x: Tensor, rows: Sequence[int] | None) -> dict[str, Any]:
    """What of a call must be equal on all ranks, as plain values."""
    if rows is None:
        return {"x": describe(x)}
    return {"x": f"{dtype_name(x.dtype)} {['n', *x.shape[1:]]}", "rows": list(rows)}


def bind(
    adapter: Any,
    problem: AllGatherProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a call runs: the checks, the destination, the launch. A rank without rows launches, too."""
    launch, timeout_s, groups = adapter.launch, HUB.settings[TIMEOUT], group_type()
    dtype, world_size = getattr(torch, problem.dtype), problem.world_size
    known, compare = GroupCalls(adapter), comparing(NAME, adapter, timeout_s)

    def is_place(out: Any, x: Tensor) -> bool:
        return out is not x and plain_place(out, (x.shape[0] * world_size, *x.shape[1:]), dtype, device, (x,))

    def run(x: Tensor, group: ProcessGroup | str, out: Tensor | None, rows: Sequence[int] | None) -> Tensor:
        equal = rows is None and type(group) is groups
        key: Any = None
        again, made = 0, out
        if equal and not getattr(x, "is_nested", True):
            key, calls = (x.shape, out is None), known.of(group)
            ready = calls.results.get(key)
            if ready is not None:
                given: tuple[Tensor, Tensor] = (x, *ready.take())
                if calls.launches(key, given) == 2:
                    tick()
                    return given[1]
            if key in calls and (out is not None or dense(x, dtype, device)):
                made = x.new_empty(key[0][0] * world_size, *key[0][1:]) if out is None else out
                again = known.again(calls, key, (x, made))
                if again == 2:
                    tick()
                    assert made is not None
                    if out is None:
                        known.make_ready(calls, key, made)
                    return made
        if again:
            pg, total = cast(Any, group), key[0][0] * world_size
        elif equal and plain_operand(x, dtype, device) and x.ndim and (out is None or is_place(out, x)):
            pg, total = cast(Any, group), x.shape[0] * world_size
        else:
            key = None
            pg, total = check(x, group, out, rows)
            if x.get_device() != device:
                result: Tensor = elsewhere(x.get_device())(x, pg, out, rows)
                return result
            if x.dtype is not dtype:
                refuse(NAME, "x", f"is {describe(x)}", f"the plan is for {problem.dtype}")
        if pg.size() != world_size:
            refuse(NAME, "group", f"has {pg.size()} ranks", f"the plan is for {world_size}")
        if (rows is not None) is not problem.unequal:
            wanted = "the plan is for rows of each rank" if problem.unequal else "the plan is for equal rows"
            refuse(NAME, "rows", f"is {rows}", wanted)
        if made is None:
            made = torch.empty(total, *x.shape[1:], dtype=dtype, device=x.device)
        if key is not None and not again:
            calls.learn(key, (x, made), 1, int(out is None))
        if compare is not None:
            compare(pg, gathered(x, rows))
        tick()
        try:
            if rows is None:  # a kernel without the feature need not take it
                launch(x, made, pg, timeout_s)
            else:
                launch(x, made, pg, timeout_s, rows)
        except Exception as error:
            failed_launch(launch, error)
            raise
        if again:
            known.attach(calls, key, (x, made), x, made, pg, timeout_s)
        return made

    return run


_op: Op[AllGatherProblem] = Op(
    Contract.of(
        ALL_GATHER,
        problem_of=from_keys(AllGatherProblem, "unequal"),
        adapter=AllGatherAdapter,
        bind=bind,
        reference=all_gather_reference,
        example="kernelhub.ops.comm.inputs:all_gather_inputs",
    )
)
_get = _op.table.get
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class AllGatherPlan(CollectivePlan):
    """Kernels selected for a group: ``run(x, out=None, rows=None)``, for any number of rows.

    `rows` is given to runs if it was given to `prepare`. A run switches between kernels by the bytes of the largest
    message.
    """

    __slots__ = ()
    call = "x, group, out, rows"

    @staticmethod
    def message_bytes(x: Tensor, *arguments: Any) -> int:
        return message_bytes(x, arguments[2])


def _prepare(*args: Any, backend: Backend = None, **kwargs: Any) -> AllGatherPlan:
    """Select once for arguments like these, compare the selection with those of the other ranks, and connect to them.

    All ranks of the group call it, in the same order. Arguments as of `all_gather`.

    Raises:
        RanksDisagree: a rank gives another shape, dtype or `rows`, selects another kernel, fails, or is missing after
            KERNELHUB_COMM_TIMEOUT_S.
    """

    def state(parsed: Any) -> dict[str, Any]:
        x, _, _, rows = parsed.arguments
        return gathered(x, rows)

    return prepare(_op, AllGatherPlan, backend, args, kwargs, state)


_prepare.__annotations__["return"] = AllGatherPlan


def _memory(x: Tensor, group: str, rows: Sequence[int] | None, **others: Any) -> dict[str, Tensor]:
    total = x.shape[0] * resolved(NAME, group).size() if rows is None else sum(rows)
    return {"out": x.new_empty(total, *x.shape[1:])}


@publish(_op, _prepare, traced=Traced(_memory))
def all_gather(
    x: Tensor,
    group: torch.distributed.ProcessGroup | str,
    out: Tensor | None = None,
    rows: Sequence[int] | None = None,
    backend: Backend = None,
) -> Tensor:
    """Gather the rows of all ranks of a process group, in the order of ranks. Every rank of the group calls it.

    `all_gather.prepare` compares shape, dtype, `rows` and kernel of all ranks, and names a rank that differs or is
    missing. A direct call and `plan.run` compare them but for the kernel on a CPU, all of them with KERNELHUB_CHECK=1,
    and nothing on a GPU without it.

    Args:
        x: ``[n, ...]``, the rows of this rank, in float32, float16, bfloat16, float8_e4m3fn, uint8, int32 or int64.
        group: a process group of torch.distributed that this process is in, or its registered `group_name`.
        out: destination. It must not overlap `x`.
        rows: number of rows of each rank, the same list on all ranks, if they differ; some may be 0. By default all
            ranks have as many rows as this one.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        ``[n of all ranks, ...]`` in the dtype of `x`.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.
        RanksDisagree: on a CPU, or with KERNELHUB_CHECK=1, a rank calls something else, or is refused; on every
            rank, before data is sent.
        RuntimeError: on a CPU, a rank is dead, or did not join within KERNELHUB_COMM_TIMEOUT_S; the message names it.
            The group cannot be used any more.

    Source:
        `torch.distributed.all_gather_into_tensor`, whose result this is for equal rows.

    Example:
        >>> import torch, kernelhub
        >>> from kernelhub.ops.comm.inputs import alone
        >>> x = torch.arange(4.0)
        >>> torch.equal(kernelhub.all_gather(x, alone(x.device), rows=[4]), x)
        True
    """
    if type(x) is not Tensor and isinstance(x, Tensor) and not isinstance(backend, DryRun):
        traced: Tensor = _op.traced(x, group, out, rows, backend)
        return traced
    if _op.again is not None:
        again: Tensor | None = _op.again(x, group, out, rows, backend)
        if again is not None:
            return again
    try:
        try:
            pg = resolved(NAME, group)
            kind, *place = connection(NAME, pg, x, message_bytes(x, rows))
            key = (x.dtype, pg.size(), kind, rows is not None, *place)
        except (AttributeError, TypeError, LookupError, RuntimeError, InvalidArgument):
            check(x, group, out, rows)
            raise
        run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
        if run is None:
            check(x, group, out, rows)
            run = _op.decide(key, x.get_device(), backend)
        result: Tensor = run(x, pg, out, rows)
        return result
    except KernelhubError as error:
        inform(NAME, error, x, group, backend)
        raise
