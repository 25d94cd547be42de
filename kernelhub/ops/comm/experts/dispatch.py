"""`moe_dispatch`: tokens to the ranks of their experts."""

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
from kernelhub.dispatch.whole_calls import WATCHED, Finished
from kernelhub.errors import InvalidArgument, KernelhubError
from kernelhub.ops.arguments import dtype_name, refuse
from kernelhub.ops.call_plan import CallPlan
from kernelhub.ops.comm.comparing import comparing
from kernelhub.ops.comm.experts.adapter import DispatchAdapter, Outgoing
from kernelhub.ops.comm.experts.again import into_earlier
from kernelhub.ops.comm.experts.checks import DISPATCH as NAME
from kernelhub.ops.comm.experts.checks import check_dispatch, check_problem
from kernelhub.ops.comm.experts.prepared import prepared
from kernelhub.ops.comm.experts.problem import BLOCK, FIXED, MOE_DISPATCH, TOKENS, DispatchProblem, capacity_of
from kernelhub.ops.comm.experts.received import Dispatched
from kernelhub.ops.comm.experts.reference import moe_dispatch_reference
from kernelhub.ops.comm.experts.results import Fresh, Results, header_of_capacity, outputs_of, places_of, renew
from kernelhub.ops.comm.experts.traced import TracedDispatch
from kernelhub.ops.comm.group import resolved
from kernelhub.ops.comm.known import GroupCalls, group_type
from kernelhub.ops.comm.refusing import failed_launch, inform, informing
from kernelhub.ops.comm.topology import linked
from kernelhub.ops.known_calls import KnownCalls
from kernelhub.probes.device import facts_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_TIMEOUT = "KERNELHUB_COMM_TIMEOUT_S"
_OPERANDS = 4


def problem_of(key: Any, device: int) -> DispatchProblem:
    """The problem that a key means on a device; the key is built in `moe_dispatch`."""
    dtype, hidden_size, top_k, num_experts, world_size, group_backend, capacity, format, scales, link, peers = key
    return DispatchProblem(
        device=facts_of(device),
        dtype=dtype_name(dtype),
        hidden_size=hidden_size,
        top_k=top_k,
        num_experts=num_experts,
        world_size=world_size,
        group_backend=group_backend,
        capacity=capacity,
        format=format,
        scales=scales,
        link=link,
        peers=peers,
    )


def bind(
    adapter: DispatchAdapter,
    problem: DispatchProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a call runs: the checks, the launch. A rank without tokens launches, too."""
    launch, timeout_s, groups = adapter.launch, HUB.settings[_TIMEOUT], group_type()
    world_size, calls, known = problem.world_size, KnownCalls(), GroupCalls(adapter)
    compare = comparing(NAME, adapter, timeout_s)
    last: Callable[..., bool] | None = None  # of the last call into an earlier result

    def run(
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        group: ProcessGroup | str,
        num_experts: int,
        scales: Tensor | None,
        format: str,
        max_tokens: int | None,
        out: Dispatched | None = None,
    ) -> Dispatched:
        nonlocal last
        again = None if out is None else last
        if again and again(x, topk_ids, topk_weights, group, num_experts, scales, format, max_tokens, out):
            tick()
            return out  # type: ignore[return-value]
        places = None if out is None else places_of(out, format)
        operands: tuple[Any, ...] = (x, topk_ids, topk_weights, scales, *(places or ()))
        key = None
        if type(num_experts) is int and type(format) is str and (max_tokens is None or type(max_tokens) is int):
            key = None if getattr(x, "is_nested", True) else (x.shape, num_experts, format, max_tokens, out is None)
        if out is not None and places is None:
            key = None
        group = resolved(NAME, group) if type(group) is str else group
        at_once: Any = known.of(group) if known.repeats and type(group) is groups else None
        made = None if at_once is None else at_once.results.get(key)
        if made is not None and out is not None:
            if made(x, topk_ids, topk_weights, group, num_experts, scales, format, max_tokens, out):
                last = made
                tick()
                return out
        elif made is not None:
            outputs = made.take()
            if at_once.launches(key, (*operands, *outputs)) == 2:
                tick()
                sent: Dispatched = made.dispatched(outputs, topk_ids)
                if WATCHED.launched is not None:
                    WATCHED.finished = Finished(sent, made.dispatched, topk_ids)
                return sent
        holds = type(group) is groups and calls.holds(key, operands)
        if holds and group.size() == world_size:  # type: ignore[union-attr]
            pg: Any = group
        else:
            pg = check_dispatch(x, topk_ids, topk_weights, group, num_experts, scales, format, max_tokens, out)
            arguments = (x, topk_ids, topk_weights, pg, num_experts, scales, format, max_tokens, out)
            if x.get_device() != device:
                there: Dispatched = elsewhere(x.get_device())(*arguments)
                return there
            check_problem(problem, arguments)
            calls.learn(key, operands, len(operands) - _OPERANDS)
        given = outgoing(x, topk_ids, topk_weights, scales, max_tokens, out)
        if compare is not None:
            compare(pg, statement(x, topk_ids, num_experts, scales, format, max_tokens))
        tick()
        try:
            sent = launch(given, pg, timeout_s)
        except Exception as error:
            failed_launch(launch, error)
            raise
        if out is not None and sent is not out:
            sent = renew(out, sent)
        if holds and at_once is not None:
            outputs = outputs_of(sent)
            everything = operands if out is not None else (*operands, *outputs)
            if not at_once.holds(key, everything):
                destinations = len(everything) - _OPERANDS
                at_once.learn(key, everything, destinations, 0 if out is not None else destinations)
            elif known.attach(at_once, key, everything, given, outputs, pg, timeout_s):
                results: Any = adapter.results(given)
                if out is not None:
                    launches, of_adapter = at_once.launcher(key)
                    results = into_earlier(launches, of_adapter, results, pg, num_experts, format, max_tokens)
                at_once.results[key] = results
        return sent

    return run


def statement(
    x: Tensor, topk_ids: Tensor, num_experts: int, scales: Tensor | None, format: str, max_tokens: int | None
) -> dict[str, Any]:
    """What of a call must be equal on all ranks, as plain values."""
    return {
        "x": f"{dtype_name(x.dtype)} [T, {x.shape[1]}]",
        "topk_ids": f"[T, {topk_ids.shape[1]}]",
        "num_experts": num_experts,
        "scales": "missing" if scales is None else "given",
        "format": format,
        "max_tokens": max_tokens,
    }


def outgoing(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    scales: Tensor | None,
    max_tokens: int | None,
    out: Dispatched | None = None,
) -> Outgoing:
    """What an adapter is given."""
    return Outgoing(x, scales, topk_ids.contiguous(), topk_weights.contiguous(), max_tokens or 0, out)


_op: Op[DispatchProblem] = Op(
    Contract.of(
        MOE_DISPATCH,
        problem_of=problem_of,
        adapter=DispatchAdapter,
        bind=bind,
        reference=moe_dispatch_reference,
        example="kernelhub.ops.comm.experts.inputs:dispatch_inputs",
    )
)
_get = _op.table.get
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class DispatchPlan(CallPlan):
    """A kernel selected for a group: ``run(x, topk_ids, topk_weights, scales=None, out=None)`` dispatches tokens.

    Ranks compared all but the number of their tokens when they prepared the plan. On a GPU a run
    compares them again with KERNELHUB_CHECK=1 only.
    """

    __slots__ = ("_device", "_max_tokens")
    repeats_but = "out"  # which is no tensor: `into_earlier` makes such runs
    repeats_without = ("group",)
    call = "x, topk_ids, topk_weights, group, num_experts, scales, format, max_tokens, out"
    kept = ("group", "num_experts", "format", "max_tokens")

    def __init__(self, op: Op[Any], bound: Bound, parsed: ParsedCall, **others: Any) -> None:
        run = informing(NAME, bound.run, self.call.split(", ").index("group"), parsed.arguments[0])
        super().__init__(op, bound, parsed, run=run, **others)
        self._device, self._max_tokens = parsed.arguments[0].device, parsed.arguments[-2]

    def results(self) -> Dispatched:
        """Memory for the `out` of runs, before the first one: a result of no tokens.

        It is this rank's alone, and communicates with no rank. A combine of it reads no row.

        Raises:
            InvalidArgument: the plan was prepared without `max_tokens`.
        """
        if self._max_tokens is None:
            fix = "give it to prepare: the shapes of results follow from it"
            refuse(NAME, "max_tokens", "is None", fix)
        problem: DispatchProblem = self.selection.problem
        sizes = problem.world_size, problem.num_experts, problem.top_k
        header = header_of_capacity(problem.format, FIXED, *sizes, 0, self._max_tokens)
        scales = -(-problem.hidden_size // BLOCK) if problem.scales else 0
        dtype = getattr(torch, problem.dtype)
        fresh = Fresh(header, problem.hidden_size, problem.top_k, scales, dtype, self._device)
        ids = torch.empty(0, problem.top_k, dtype=torch.int32, device=self._device)
        made = Results(header, fresh).dispatched(fresh.alone(), ids)
        slots, weights = made.handle[2:4]
        slots.fill_(-1)
        for part in (weights, made.counts, made.offsets):
            if part is not None:
                part.zero_()
        return made


def _prepare(*args: Any, backend: Backend = None, **kwargs: Any) -> DispatchPlan:
    """Select once for tokens like these, compare the selection with those of the other ranks, and connect to them.

    All ranks of the group call it, in the same order. Arguments as of `moe_dispatch`.

    Raises:
        RanksDisagree: a rank gives other arguments (but for its number of tokens), selects another kernel, fails, such
            as for more tokens than `max_tokens`, or is missing after KERNELHUB_COMM_TIMEOUT_S.
    """

    def state(x: Tensor, topk_ids: Tensor, *others: Any) -> dict[str, Any]:
        return statement(x, topk_ids, *others[2:6])

    def connect(plan: DispatchPlan, pg: ProcessGroup, timeout_s: float, given: tuple[Any, ...]) -> None:
        x, topk_ids, topk_weights, _, _, scales, _, max_tokens, _ = given
        plan.adapter.connect(outgoing(x, topk_ids, topk_weights, scales, max_tokens), pg, timeout_s)

    return prepared(_op, DispatchPlan, 3, state, connect, backend, args, kwargs)


_prepare.__annotations__["return"] = DispatchPlan


@publish(_op, _prepare, traced=TracedDispatch())
def moe_dispatch(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    group: torch.distributed.ProcessGroup | str,
    num_experts: int,
    scales: Tensor | None = None,
    format: str = TOKENS,
    max_tokens: int | None = None,
    out: Dispatched | None = None,
    backend: Backend = None,
) -> Dispatched:
    """Send each token to the ranks of its experts. Every rank of the group calls it, also one without tokens.

    Rank r of W holds the experts ``r * E / W`` to ``(r + 1) * E / W - 1``. `moe_dispatch.prepare` compares arguments of
    all ranks, and names a rank that differs or is missing. A direct call and `plan.run` compare them on a CPU or with
    KERNELHUB_CHECK=1, and nothing on a GPU without it.

    Args:
        x: tokens ``[T, H]``, float32, float16, bfloat16 or float8_e4m3fn; T may differ between ranks, and be 0.
        topk_ids: int32 ``[T, top_k]``, experts of each token by their global ids. Ids that name no expert, such as -1,
            send nothing. An expert may repeat: its weights are added.
        topk_weights: float32 ``[T, top_k]``.
        group: a process group of torch.distributed that this process is in, or its registered `group_name`.
        num_experts: E, experts of all ranks, a multiple of their number.
        scales: float32 ``[T, ceil(H / 128)]``, the scales of float8 rows, which go with them.
        format: ``"tokens"``, a row per token with its ids and weights, as `fused_moe` takes them; ``"contiguous"``, a
            row per token and expert, sorted by expert; or ``"masked"``, the same padded per expert. `grouped_gemm`
            takes the last two.
        max_tokens: most tokens of any rank, the same on all ranks. The shapes of the result follow from it, nothing
            waits for the GPU, and the call can be captured in a CUDA graph. Without it the result is exact, and the
            call waits for the GPU.
        out: a result that this call writes again and returns: what an earlier call with this format, this `max_tokens`
            and operands of these columns and dtypes returned, or `plan.results()`. The numbers of tokens may differ.
            Its tensors, contiguous ones of the shapes and dtypes below on the device of x, must not overlap each other
            nor an operand. Its handle, the same list, becomes that of this call: nothing of the earlier call can be
            combined any more. Only with `max_tokens`.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        `Dispatched`: x, scales, topk_ids, topk_weights, counts, offsets, and the handle for `moe_combine`. With
        `max_tokens` x has ``R = W * max_tokens`` rows in format tokens, ``R * min(top_k, E / W)`` in format contiguous,
        and M is R in format masked. Tokens are in the order of their ranks, then of their rows. Rows of no expert hold
        anything. With `out` it is `out`.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.
        RanksDisagree: on a CPU, or with KERNELHUB_CHECK=1, a rank calls something else, or is refused; on every
            rank, before data is sent.
        RuntimeError: on a CPU, a rank is dead, or did not join within KERNELHUB_COMM_TIMEOUT_S; the message names it.
            The group cannot be used any more.

    Source:
        DeepSeek-V3 (2024), section 3.2.2; the formats are those of vLLM's and SGLang's expert parallelism (standard,
        contiguous and batched), and of DeepGEMM's grouped products.

    Example:
        >>> import torch, kernelhub
        >>> from kernelhub.ops.comm.inputs import alone
        >>> x, group = torch.ones(3, 32), alone(torch.device("cpu"))
        >>> weights, ids = kernelhub.route_experts(torch.randn(3, 8), 2)
        >>> sent = kernelhub.moe_dispatch(x, ids, weights, group, 8, format="contiguous")
        >>> sent.x.shape, int(sent.counts.sum())
        (torch.Size([6, 32]), 6)
        >>> torch.allclose(kernelhub.moe_combine(sent.x, sent.handle, group), weights.sum(1, keepdim=True) * x)
        True
    """
    if type(x) is not Tensor and isinstance(x, Tensor) and not isinstance(backend, DryRun):
        traced: Dispatched = _op.traced(
            x, topk_ids, topk_weights, group, num_experts, scales, format, max_tokens, out, backend
        )
        return traced
    if out is None and _op.again is not None:  # a result is no tensor
        again: Dispatched | None = _op.again(
            x, topk_ids, topk_weights, group, num_experts, scales, format, max_tokens, out, backend
        )
        if again is not None:
            return again
    try:
        try:
            pg = resolved(NAME, group)
            kind, *link = linked(NAME, pg, x)
            key = (
                x.dtype,
                x.shape[1],
                topk_ids.shape[1],
                num_experts,
                pg.size(),
                kind,
                capacity_of(max_tokens),
                format,
                scales is not None,
                *link,
            )
            run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
        except (AttributeError, TypeError, LookupError, RuntimeError, InvalidArgument):
            check_dispatch(x, topk_ids, topk_weights, group, num_experts, scales, format, max_tokens, out)
            raise
        if run is None:
            check_dispatch(x, topk_ids, topk_weights, group, num_experts, scales, format, max_tokens, out)
            run = _op.decide(key, x.get_device(), backend)
        result: Dispatched = run(x, topk_ids, topk_weights, pg, num_experts, scales, format, max_tokens, out)
        return result
    except KernelhubError as error:
        inform(NAME, error, x, group, backend)
        raise
