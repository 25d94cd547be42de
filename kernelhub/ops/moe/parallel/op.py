"""`expert_parallel_moe`: a layer of experts that are spread over ranks, as one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.op import Backend, DryRun, Op, ParsedCall
from kernelhub.dispatch.plan import publish
from kernelhub.errors import InvalidArgument, KernelhubError
from kernelhub.ops.arguments import describe, refuse
from kernelhub.ops.call_plan import CallPlan
from kernelhub.ops.comm.comparing import comparing
from kernelhub.ops.comm.experts.prepared import prepared
from kernelhub.ops.comm.experts.problem import capacity_of
from kernelhub.ops.comm.group import resolved
from kernelhub.ops.comm.refusing import failed_launch, inform, informing
from kernelhub.ops.comm.topology import linked
from kernelhub.ops.moe.experts.call import key_of
from kernelhub.ops.moe.experts.call import problem_of as problem_of_experts
from kernelhub.ops.moe.experts.checks import Operands
from kernelhub.ops.moe.experts.checks import check as check_experts
from kernelhub.ops.moe.parallel.adapter import Layer, ParallelAdapter, Part
from kernelhub.ops.moe.parallel.problem import EXPERT_PARALLEL_MOE, ParallelProblem
from kernelhub.ops.moe.parallel.reference import SCALES, expert_parallel_moe_reference
from kernelhub.ops.operands import check_count, check_destination
from kernelhub.ops.operators import Traced
from kernelhub.ops.packed import PackedWeight
from kernelhub.probes.device import facts_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAME = "expert_parallel_moe"
_OF_EXPERTS = 16  # facets of a key that are those of `fused_moe`, without the number of tokens
_GROUP_AT = 5  # of the arguments of a call


def problem_of(key: Any, device: int) -> ParallelProblem:
    """The problem that a key means on a device; the key is built in `expert_parallel_moe`."""
    experts = problem_of_experts((*key[:_OF_EXPERTS], False), device)
    world_size, group_backend, capacity, link, peers = key[_OF_EXPERTS:]
    return ParallelProblem(
        device=facts_of(device),
        dtype=experts.dtype,
        weights=experts.weights,
        activation_dtype=experts.activation_dtype,
        num_experts=experts.num_experts * world_size,
        top_k=experts.top_k,
        hidden_size=experts.hidden_size,
        intermediate_size=experts.intermediate_size,
        world_size=world_size,
        group_backend=group_backend,
        capacity=capacity,
        link=link,
        peers=peers,
        activation=experts.activation,
        w13_bias=experts.w13_bias,
        w2_bias=experts.w2_bias,
    )


def operands_of(
    x: Any,
    w13: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    scales: Any,
    alpha: Any,
    limit: Any,
    out: Any,
) -> Operands:
    """A call as one of `fused_moe`, without what that has and this op has not."""
    parts = dict(zip(SCALES, scales, strict=True))
    rest = {"a1_scale": None, "a2_scale": None, "expert_map": None, "residual": None}
    return Operands(x, w13, w2, topk_weights, topk_ids, alpha=alpha, limit=limit, out=out, **parts, **rest)


def check(given: Operands, group: Any, activation: Any, activation_dtype: Any, max_tokens: Any) -> ProcessGroup:
    """Everything that the contract says of a call; returns the group."""
    for parameter in ("w13", "w2"):
        if isinstance(getattr(given, parameter), PackedWeight):
            refuse(NAME, parameter, "is packed", "give the checkpoint's tensors")
    try:
        check_experts(given._replace(out=None), activation, activation_dtype)
    except InvalidArgument as error:
        said = str(error).removeprefix(f"{error.op}: {error.parameter} ").partition("; ")
        raise InvalidArgument(NAME, error.parameter, said[0], said[2]) from None
    pg = resolved(NAME, group)
    if max_tokens is not None:
        tokens = given.x.shape[0]
        fix = "give the most tokens of any rank, the same number on every rank, or None"
        check_count(NAME, "max_tokens", max_tokens, 1, fix=fix)
        if tokens > max_tokens:
            fix = f"max_tokens is {max_tokens}: split the batch, or prepare a plan for more on every rank"
            refuse(NAME, "x", f"has {tokens} tokens", fix)
    if given.out is not None:
        read = {name: value for name, value in given._asdict().items() if isinstance(value, Tensor) and name != "out"}
        check_destination(NAME, "out", given.out, given.x.shape, given.x.dtype, given.x.device, read)
    return pg


def _key(given: Operands, pg: ProcessGroup, activation: str, activation_dtype: Any, max_tokens: int | None) -> Any:
    of_experts = key_of(given, activation, activation_dtype, False)[:_OF_EXPERTS]
    kind, link, peers = linked(NAME, pg, given.x)
    return (*of_experts, pg.size(), kind, capacity_of(max_tokens), link, peers)


def bind(
    adapter: ParallelAdapter,
    problem: ParallelProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a call runs: the checks, the destination, the launch. A rank without tokens launches, too."""
    launch, compare = adapter.launch, comparing(NAME, adapter, HUB.settings["KERNELHUB_COMM_TIMEOUT_S"])
    facets = [name for name in ParallelProblem.__dataclass_fields__ if name != "device"]

    def run(
        x: Tensor,
        w13: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        group: ProcessGroup | str,
        activation: str,
        activation_dtype: Any,
        w13_scale: Tensor | None,
        w2_scale: Tensor | None,
        w13_global_scale: Tensor | None,
        w2_global_scale: Tensor | None,
        w13_bias: Tensor | None,
        w2_bias: Tensor | None,
        alpha: float,
        limit: float,
        max_tokens: int | None,
        out: Tensor | None,
        checked: bool = False,
    ) -> Tensor:
        """`checked`: the call was checked, and this function made for it."""
        scales = (w13_scale, w2_scale, w13_global_scale, w2_global_scale, w13_bias, w2_bias)
        given = operands_of(x, w13, w2, topk_weights, topk_ids, scales, alpha, limit, out)
        if checked:
            return launched(given, resolved(NAME, group), activation, activation_dtype, max_tokens)
        pg = check(given, group, activation, activation_dtype, max_tokens)
        if x.get_device() != device:
            there: Tensor = elsewhere(x.get_device())(
                *given[:5], pg, activation, activation_dtype, *scales, alpha, limit, max_tokens, out
            )
            return there
        mine = problem_of(_key(given, pg, activation, activation_dtype, max_tokens), device)
        for name in facets:
            got, wanted = getattr(mine, name), getattr(problem, name)
            if got != wanted:
                refuse(NAME, "x", f"and the other arguments make {name} {got}", f"the plan is for {wanted}")
        return launched(given, pg, activation, activation_dtype, max_tokens)

    def launched(
        given: Operands, pg: ProcessGroup, activation: str, activation_dtype: Any, max_tokens: int | None
    ) -> Tensor:
        out = given.out
        if out is None:
            out = torch.empty_like(given.x, memory_format=torch.contiguous_format)
        if compare is not None:
            compare(pg, statement(given.x, given.w13, given.topk_weights, activation, activation_dtype, max_tokens))
        tick()
        try:
            launch(layer_of(given, max_tokens), out, pg)
        except Exception as error:
            failed_launch(launch, error)
            raise
        return out

    return run


def statement(
    x: Tensor, w13: Any, topk_weights: Tensor, activation: str, activation_dtype: Any, max_tokens: int | None
) -> dict[str, Any]:
    """What of a call must be equal on all ranks, as plain values."""
    return {
        "x": f"{x.dtype} [T, {x.shape[1]}]",
        "w13": describe(w13),
        "topk_weights": f"[T, {topk_weights.shape[1]}]",
        "activation": activation,
        "activation_dtype": str(activation_dtype),
        "max_tokens": max_tokens,
    }


def layer_of(given: Operands, max_tokens: int | None) -> Layer:
    """A call as an adapter is given it."""
    assert isinstance(given.w13, Tensor)
    assert isinstance(given.w2, Tensor)
    scales = {name: getattr(given, name) for name in SCALES if getattr(given, name) is not None}
    numbers = {"alpha": given.alpha, "limit": given.limit}
    return Layer(*given[:1], given.topk_weights, given.topk_ids, given.w13, given.w2, scales, numbers, max_tokens)


_op: Op[ParallelProblem] = Op(
    Contract.of(
        EXPERT_PARALLEL_MOE,
        problem_of=problem_of,
        adapter=ParallelAdapter,
        bind=bind,
        reference=expert_parallel_moe_reference,
        example="kernelhub.ops.moe.parallel.inputs:parallel_inputs",
    )
)
_get = _op.table.get
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class ParallelPlan(CallPlan):
    """A pair selected for a group: `run` is a whole call, with the group and `max_tokens` of the plan.

    Attributes:
        parts: the steps, with the kernel selected for each: dispatch, converters, experts, combine.
    """

    __slots__ = ("parts",)
    repeats = False
    call = (
        "x, w13, w2, topk_weights, topk_ids, group, activation, activation_dtype, w13_scale, w2_scale, "
        "w13_global_scale, w2_global_scale, w13_bias, w2_bias, alpha, limit, max_tokens, out"
    )
    kept = ("group", "activation", "activation_dtype", "max_tokens")
    parts: tuple[Part, ...]

    def __init__(self, op: Op[Any], bound: Bound, parsed: ParsedCall, **others: Any) -> None:
        run = informing(NAME, bound.run, _GROUP_AT, parsed.arguments[0])
        super().__init__(op, bound, parsed, run=run, **others)


def _prepare(*args: Any, backend: Backend = None, **kwargs: Any) -> ParallelPlan:
    """Select a pair once for a layer like this, compare it with those of the other ranks, and connect to them.

    All ranks of the group call it, in the same order. Arguments as of `expert_parallel_moe`.

    Raises:
        RanksDisagree: a rank gives other arguments (but for its number of tokens), selects another kernel, fails, or is
            missing after KERNELHUB_COMM_TIMEOUT_S.
    """

    def state(x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, *others: Any) -> dict[str, Any]:
        return statement(x, w13, topk_weights, others[2], others[3], others[-2])

    def connect(plan: ParallelPlan, pg: ProcessGroup, timeout_s: float, given: tuple[Any, ...]) -> None:
        x, w13, w2, topk_weights, topk_ids = given[:5]
        operands = operands_of(x, w13, w2, topk_weights, topk_ids, given[8:14], given[14], given[15], None)
        plan.parts = plan.adapter.connect(layer_of(operands, given[16]), pg)

    return prepared(_op, ParallelPlan, _GROUP_AT, state, connect, backend, args, kwargs)


_prepare.__annotations__["return"] = ParallelPlan


def _memory(x: Tensor, **others: Any) -> dict[str, Tensor]:
    return {"out": x.new_empty(x.shape)}


@publish(_op, _prepare, traced=Traced(_memory))
def expert_parallel_moe(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    group: torch.distributed.ProcessGroup | str,
    *,
    activation: str = "silu",
    activation_dtype: torch.dtype | str | None = None,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    w13_global_scale: Tensor | None = None,
    w2_global_scale: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    max_tokens: int | None = None,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """Run tokens through experts that are spread over the ranks of a group: dispatch, experts, combine in one call.

    Every rank of the group calls it, also one without tokens. The kernel is a pair of a format of dispatched tokens and
    the op that runs experts in it; the kernels of both, and of the combine, are selected by their own ops. `plan.parts`
    names them.

    Args:
        x: this rank's tokens ``[T, H]``, float32, float16 or bfloat16. T may differ between ranks, and be 0.
        w13: this rank's experts ``[E / W, 2I, H]``, in the formats of `fused_moe`, of one shape on all ranks. Rank r
            holds the experts ``r * E / W`` to ``(r + 1) * E / W - 1``.
        w2: ``[E / W, H, I]``, in the same format.
        topk_weights: float32 ``[T, top_k]``.
        topk_ids: int32 ``[T, top_k]``, global ids; those that name no expert are skipped.
        group: a process group of torch.distributed that this process is in, or its registered `group_name`.
        activation, activation_dtype: as of `fused_moe`.
        w13_scale, w2_scale, w13_global_scale, w2_global_scale, w13_bias, w2_bias: as of `fused_moe`, of this rank's
            experts.
        alpha, limit: as of `fused_moe`.
        max_tokens: most tokens of any rank, the same on all ranks, as of `moe_dispatch`: nothing waits for the GPU.
        out: destination ``[T, H]``. It must not overlap the operands.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        ``[T, H]`` in the dtype of x: the weighted sum over all experts. No all-reduce follows.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call, or no kernel a part of the pair. The message gives the reason of each.
        RanksDisagree: on a CPU, or with KERNELHUB_CHECK=1, a rank calls something else, or is refused; on every
            rank, before data is sent.
        RuntimeError: on a CPU, a rank is dead, or did not join within KERNELHUB_COMM_TIMEOUT_S; the message names it.
            The group cannot be used any more.

    Source:
        As of `moe_dispatch` and `fused_moe`; the pairs are those that vLLM's and SGLang's tables of dispatchers and
        experts have for kernels of this package.

    Example:
        >>> import torch, kernelhub
        >>> from kernelhub.ops.comm.inputs import alone
        >>> x, group = torch.randn(5, 32), alone(torch.device("cpu"))
        >>> w13, w2 = torch.randn(8, 48, 32), torch.randn(8, 32, 24)
        >>> weights, ids = kernelhub.route_experts(torch.randn(5, 8), 2)
        >>> out = kernelhub.expert_parallel_moe(x, w13, w2, weights, ids, group, max_tokens=8)
        >>> torch.allclose(out, kernelhub.fused_moe(x, w13, w2, weights, ids), atol=1e-3)
        True
    """
    try:
        if type(x) is not Tensor and isinstance(x, Tensor) and not isinstance(backend, DryRun):
            traced: Tensor = _op.traced(**locals())
            return traced
        scales = (w13_scale, w2_scale, w13_global_scale, w2_global_scale, w13_bias, w2_bias)
        given = operands_of(x, w13, w2, topk_weights, topk_ids, scales, alpha, limit, out)
        try:
            key = _key(given, resolved(NAME, group), activation, activation_dtype, max_tokens)
            run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
        except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
            check(given, group, activation, activation_dtype, max_tokens)
            raise
        arguments: tuple[Any, ...] = (x, w13, w2, topk_weights, topk_ids, group, activation, activation_dtype)
        arguments += (*scales, alpha, limit, max_tokens, out)
        if run is None:
            check(given, group, activation, activation_dtype, max_tokens)
            run = _op.decide(key, x.get_device(), backend)
            if not isinstance(backend, DryRun):
                arguments += (True,)  # it was checked
        result: Tensor = run(*arguments)
        return result
    except KernelhubError as error:
        inform(NAME, error, x, group, backend)
        raise
