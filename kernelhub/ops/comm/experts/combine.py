"""`moe_combine`: results of experts back to the ranks of their tokens, weighted and summed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.op import Backend, DryRun, Op, ParsedCall
from kernelhub.dispatch.plan import publish
from kernelhub.dispatch.whole_calls import WATCHED, Kept
from kernelhub.errors import InvalidArgument, KernelhubError
from kernelhub.ops.arguments import dense, dtype_name, refuse
from kernelhub.ops.call_plan import CallPlan
from kernelhub.ops.comm.comparing import comparing
from kernelhub.ops.comm.experts.adapter import CombineAdapter
from kernelhub.ops.comm.experts.checks import COMBINE as NAME
from kernelhub.ops.comm.experts.checks import capacity_named, check_combine, rows_named
from kernelhub.ops.comm.experts.prepared import prepared
from kernelhub.ops.comm.experts.problem import FORMATS, MOE_COMBINE, CombineProblem
from kernelhub.ops.comm.experts.received import Handle, Header, Headers, header_of
from kernelhub.ops.comm.experts.reference import moe_combine_reference
from kernelhub.ops.comm.group import resolved
from kernelhub.ops.comm.known import GroupCalls, group_type
from kernelhub.ops.comm.refusing import failed_launch, inform, informing
from kernelhub.ops.comm.topology import linked
from kernelhub.ops.operators import Traced
from kernelhub.probes.device import facts_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_TIMEOUT = "KERNELHUB_COMM_TIMEOUT_S"
_READ = 4  # tensors of a handle that kernels read whose launches are repeated, the header too


def problem_of(key: Any, device: int) -> CombineProblem:
    """The problem that a key means on a device; the key is built in `moe_combine`."""
    dtype, hidden_size, top_k, num_experts, world_size, group_backend, capacity, format, rows, link, peers = key
    return CombineProblem(
        device=facts_of(device),
        dtype=dtype_name(dtype),
        hidden_size=hidden_size,
        top_k=top_k,
        num_experts=num_experts,
        world_size=world_size,
        group_backend=group_backend,
        capacity=capacity,
        format=format,
        rows=rows,
        link=link,
        peers=peers,
    )


def _facets(y: Tensor, top_k: int, header: Header) -> tuple[Any, ...]:
    """A key but for the group."""
    form = (capacity_named(header), FORMATS[header.format], rows_named(header))
    return (y.dtype, y.shape[-1], top_k, header.num_experts, header.world_size, *form)


def statement(y: Tensor, handle: Sequence[Tensor], *others: Any) -> dict[str, Any]:
    """What of a call must be equal on all ranks, as plain values."""
    header = header_of(handle)
    return {
        "y": f"{dtype_name(y.dtype)} [..., {y.shape[-1]}]",
        "format": FORMATS[header.format],
        "rows": rows_named(header),
        "num_experts": header.num_experts,
        "top_k": handle[1].shape[1],
        "max_tokens": header.max_tokens,
    }


def bind(
    adapter: CombineAdapter,
    problem: CombineProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a call runs: the checks, the destination, the launch. A rank without rows launches, too."""
    launch, timeout_s, groups, known = adapter.launch, HUB.settings[_TIMEOUT], group_type(), GroupCalls(adapter)
    dtype = getattr(torch, problem.dtype)
    compare = comparing(NAME, adapter, timeout_s)
    form = (problem.capacity, problem.format, problem.rows)
    headers = Headers()
    facets = (dtype, problem.hidden_size, problem.top_k, problem.num_experts, problem.world_size, *form)

    def run(y: Tensor, handle: Sequence[Tensor], group: ProcessGroup | str, out: Tensor | None) -> Tensor:
        numbers = headers.of(handle)
        group = resolved(NAME, group) if type(group) is str else group
        key = None
        read: Sequence[Tensor] = ()
        again, made = 0, out
        if type(group) is groups and numbers is not None and not getattr(y, "is_nested", True):
            # Kernels whose launches are repeated read no more of a handle than ids, slots and weights.
            read = handle[1:_READ] if known.repeats and headers.has_rest(handle) else handle[1:]
            key, calls = (y.shape, numbers, out is None, len(read)), known.of(group)
            ready = calls.results.get(key) if out is None else None
            if ready is not None:
                given: tuple[Any, ...] = (y, *read, *ready.take())
                if calls.launches(key, given) == 2:
                    tick()
                    if WATCHED.launched is not None:
                        WATCHED.kept = Kept(handle[0], tuple(handle[1 + len(read) :]))
                    return given[-1]  # type: ignore[no-any-return]
            if out is not None or (key in calls and dense(y, dtype, device)):
                made = y.new_empty(numbers.tokens, y.shape[-1]) if out is None else out
                again = known.again(calls, key, (y, *read, made))
                if again == 2:
                    tick()
                    if WATCHED.launched is not None:
                        WATCHED.kept = Kept(handle[0], tuple(handle[1 + len(read) :]))
                    assert made is not None
                    if out is None:
                        known.make_ready(calls, key, made)
                    return made
        if again and numbers is not None:
            pg: Any = group
            header = numbers
        else:
            pg, header = check_combine(y, handle, group, out)
            headers.keep_rest(handle)
            if y.get_device() != device:
                there: Tensor = elsewhere(y.get_device())(y, handle, pg, out)
                return there
            mine = _facets(y, handle[1].shape[1], header)
            if mine != facets:
                at = next(at for at, (one, other) in enumerate(zip(mine, facets, strict=True)) if one != other)
                refuse(NAME, "y" if at < 2 else "handle", f"makes {mine[at]}", f"the plan is for {facets[at]}")
        if made is None:
            made = torch.empty(header.tokens, y.shape[-1], dtype=dtype, device=y.device)
        operands = (y, *read, made)
        if key is not None and not again:
            calls.learn(key, operands, 1, int(out is None))
        launched = (y, Handle(*handle), header, made, pg, timeout_s)
        if compare is not None:
            compare(pg, statement(y, handle))
        tick()
        try:
            launch(*launched)
        except Exception as error:
            failed_launch(launch, error)
            raise
        if again:
            known.attach(calls, key, operands, *launched)
        return made

    return run


_op: Op[CombineProblem] = Op(
    Contract.of(
        MOE_COMBINE,
        problem_of=problem_of,
        adapter=CombineAdapter,
        bind=bind,
        reference=moe_combine_reference,
        example="kernelhub.ops.comm.experts.inputs:combine_inputs",
    )
)
_get = _op.table.get
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class CombinePlan(CallPlan):
    """A kernel selected for a group: ``run(y, handle, out=None)`` combines results of one form."""

    __slots__ = ()
    repeats_without = ("group",)
    call = "y, handle, group, out"
    kept = ("group",)

    def __init__(self, op: Op[Any], bound: Bound, parsed: ParsedCall, **others: Any) -> None:
        run = informing(NAME, bound.run, 2, parsed.arguments[0])
        super().__init__(op, bound, parsed, run=run, **others)


def _prepare(*args: Any, backend: Backend = None, **kwargs: Any) -> CombinePlan:
    """Select once for results like these, compare the selection with those of the other ranks, and connect to them.

    All ranks of the group call it, in the same order. Arguments as of `moe_combine`.

    Raises:
        RanksDisagree: a rank gives other arguments (but for its number of tokens), selects another kernel, fails, or is
            missing after KERNELHUB_COMM_TIMEOUT_S.
    """

    def connect(plan: CombinePlan, pg: ProcessGroup, timeout_s: float, given: tuple[Any, ...]) -> None:
        y, handle = given[:2]
        plan.adapter.connect(y, Handle(*handle), header_of(handle), pg, timeout_s)

    return prepared(_op, CombinePlan, 2, statement, connect, backend, args, kwargs)


_prepare.__annotations__["return"] = CombinePlan


def _memory(y: Tensor, handle: Sequence[Tensor], **others: Any) -> dict[str, Tensor]:
    return {"out": y.new_empty((handle[1].shape[0], y.shape[-1]))}


@publish(_op, _prepare, traced=Traced(_memory))
def moe_combine(
    y: Tensor,
    handle: Sequence[Tensor] | Tensor,
    group: torch.distributed.ProcessGroup | str,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """Send results of experts back and sum them for each token. Every rank of the group calls it.

    The result is complete: it is the sum over all experts of all ranks, and no all-reduce follows. The format decides
    who multiplies by the weights of the router: in format tokens the experts do, as `fused_moe`; in the other formats
    this op does (`Dispatched.weighed_by`).

    Args:
        y: a row for each row of the dispatched x, in its format, in float32, float16 or bfloat16: ``[R, H]`` the
            weighted sum over the experts of this rank, or ``[R, H]`` and ``[E / W, M, H]`` what each expert gave,
            without weights. Rows of no expert may hold anything.
        handle: that of the dispatch. It may be used more than once.
        group: the group of the dispatch.
        out: destination ``[T, H]``. It must not overlap y, nor a tensor of the handle.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        ``[T, H]`` in the dtype of y, for this rank's tokens in their order. A token without experts gets zeros. The sum
        over experts of a rank is rounded to the dtype of y before it is sent.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.
        RanksDisagree: on a CPU, or with KERNELHUB_CHECK=1, a rank calls something else, or is refused; on every
            rank, before data is sent.
        RuntimeError: on a CPU, a rank is dead, or did not join within KERNELHUB_COMM_TIMEOUT_S; the message names it.
            The group cannot be used any more.

    Source:
        As of `moe_dispatch`.

    Example:
        >>> import torch, kernelhub
        >>> from kernelhub.ops.comm.inputs import alone
        >>> x, group = torch.randn(3, 32), alone(torch.device("cpu"))
        >>> w13, w2 = torch.randn(8, 48, 32), torch.randn(8, 32, 24)
        >>> weights, ids = kernelhub.route_experts(torch.randn(3, 8), 2)
        >>> sent = kernelhub.moe_dispatch(x, ids, weights, group, 8, max_tokens=4)
        >>> y = kernelhub.fused_moe(sent.x, w13, w2, sent.topk_weights, sent.topk_ids)
        >>> out = kernelhub.moe_combine(y, sent.handle, group)
        >>> torch.allclose(out, kernelhub.fused_moe(x, w13, w2, weights, ids), atol=1e-4)
        True
    """
    if type(y) is not Tensor and isinstance(y, Tensor) and not isinstance(backend, DryRun):
        traced: Tensor = _op.traced(y, handle, group, out, backend)
        return traced
    if _op.again is not None:
        again: Tensor | None = _op.again(y, handle, group, out, backend)
        if again is not None:
            return again
    try:
        try:
            pg = resolved(NAME, group)
            facets = _facets(y, handle[1].shape[1], header_of(handle))  # type: ignore[arg-type]
            kind, *link = linked(NAME, pg, y)
            key = (*facets[:5], kind, *facets[5:], *link)
            run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
        except (AttributeError, TypeError, ValueError, LookupError, InvalidArgument, RuntimeError):
            check_combine(y, handle, group, out)
            raise
        if run is None:
            check_combine(y, handle, group, out)
            run = _op.decide(key, y.get_device(), backend)
        result: Tensor = run(y, handle, pg, out)
        return result
    except KernelhubError as error:
        inform(NAME, error, y, group, backend)
        raise
