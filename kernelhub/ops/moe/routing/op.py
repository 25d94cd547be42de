"""`route_experts`: which experts each token goes to, and with what weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.forms import python_value
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lost import failed
from kernelhub.dispatch.op import Backend, DryRun, Op
from kernelhub.dispatch.plan import publish
from kernelhub.errors import InvalidArgument
from kernelhub.ops.arguments import alike, check_wants_no_gradient, dense, describe, dtype_name, usable
from kernelhub.ops.call_plan import CallPlan, Fixed, prepares
from kernelhub.ops.known_calls import KnownCalls, is_repeated
from kernelhub.ops.moe.routing.adapter import RoutingAdapter
from kernelhub.ops.moe.routing.problem import FLOATS, ROUTE_EXPERTS, SCORINGS, SOFTMAX_AFTER_TOPK, RoutingProblem
from kernelhub.ops.moe.routing.reference import route_experts_reference
from kernelhub.ops.operands import (
    check_count,
    check_destination,
    check_flag,
    check_number,
    check_operand,
    is_plain_view,
    span_of,
    tracing_state,
)
from kernelhub.ops.operators import Traced
from kernelhub.probes.device import facts_of

NAME = "route_experts"
_FLOATS = tuple(getattr(torch, name) for name in FLOATS)


def refuse(parameter: str, problem: str, fix: str) -> NoReturn:
    """Raise the error that names the parameter."""
    raise InvalidArgument(NAME, parameter, problem, fix)


def problem_of(key: Any, device: int) -> RoutingProblem:
    """The problem that a key means on a device; the key is built in `route_experts`."""
    dtype, num_experts, top_k, scoring, num_groups, topk_groups, has_bias, renormalize, scaled = key
    return RoutingProblem(
        device=facts_of(device),
        dtype=dtype_name(dtype),
        num_experts=num_experts,
        top_k=top_k,
        num_groups=num_groups,
        topk_groups=topk_groups,
        scoring=scoring,
        correction_bias=has_bias,
        # The weights of a softmax over the chosen sum to one already.
        renormalize=renormalize and scoring != SOFTMAX_AFTER_TOPK,
        scaling_factor=bool(scaled),  # a factor of numpy compares to a bool of numpy
    )


def check(
    logits: Any,
    top_k: Any,
    scoring: Any,
    num_groups: Any,
    topk_groups: Any,
    correction_bias: Any,
    scaling_factor: Any,
    out_weights: Any,
    out_ids: Any,
    renormalize: Any = False,
) -> None:
    """Everything that the contract says of a call."""
    check_operand(NAME, "logits", logits)
    if logits.ndim != 2 or logits.shape[1] == 0:
        refuse("logits", f"has shape {list(logits.shape)}", "give [T, E] with at least one expert")
    if logits.dtype not in _FLOATS:
        refuse("logits", f"has dtype {dtype_name(logits.dtype)}", f"give {', '.join(FLOATS)}")
    tokens, num_experts = logits.shape
    if scoring not in SCORINGS:
        refuse("scoring", f"is {scoring!r}", f"give one of {', '.join(SCORINGS)}")
    fix = f"give 1 to {num_experts}, as logits have {num_experts} experts"
    check_count(NAME, "top_k", top_k, 1, num_experts, fix)
    _check_groups(num_experts, top_k, num_groups, topk_groups)
    check_flag(NAME, "renormalize", renormalize)
    check_number(NAME, "scaling_factor", scaling_factor, "give a finite float")
    if correction_bias is not None:
        check_operand(NAME, "correction_bias", correction_bias)
        if correction_bias.shape != (num_experts,) or correction_bias.dtype is not torch.float32:
            refuse("correction_bias", f"is {describe(correction_bias)}", f"give float32 [{num_experts}]")
        _check_place("correction_bias", correction_bias, logits)
    _check_place("logits", logits, logits)
    read = {"logits": logits, "correction_bias": correction_bias}
    for parameter, given, dtype in (("out_weights", out_weights, torch.float32), ("out_ids", out_ids, torch.int32)):
        if given is not None:
            check_operand(NAME, parameter, given)
            if given.shape != (tokens, top_k) or given.dtype is not dtype:
                refuse(parameter, f"is {describe(given)}", f"give {dtype_name(dtype)} [{tokens}, {top_k}]")
            check_destination(NAME, parameter, given, (tokens, top_k), dtype, logits.device, read)
            read = read | {parameter: given}


def groups_of(num_groups: Any, topk_groups: Any) -> tuple[Any, Any]:
    """(num_groups, topk_groups) as a key has them: None, 0 and 1 mean the same."""
    if num_groups in (None, 0, 1) and topk_groups in (None, 0, 1):
        return 1, 1
    return num_groups, topk_groups


def _check_groups(num_experts: int, top_k: int, num_groups: Any, topk_groups: Any) -> None:
    for parameter, number in (("num_groups", num_groups), ("topk_groups", topk_groups)):
        if number is not None and (type(number) is not int or number < 0):
            refuse(parameter, f"is {number!r}", "give a number of groups, or None for a routing without")
    if not num_groups or num_groups == 1:
        if topk_groups is not None and topk_groups > 1:
            refuse("topk_groups", f"is {topk_groups}", "give num_groups too, or None for a routing without groups")
        return
    if num_experts % num_groups:
        legal = [number for number in range(1, num_experts + 1) if num_experts % number == 0]
        nearest = min(legal, key=lambda number: abs(number - num_groups))
        refuse("num_groups", f"is {num_groups}, which does not divide {num_experts} experts", f"give {nearest}, say")
    if not topk_groups or topk_groups > num_groups:
        refuse("topk_groups", f"is {topk_groups!r}", f"give 1 to {num_groups}, the number of groups")
    within = topk_groups * (num_experts // num_groups)
    if top_k > within:
        refuse("top_k", f"is {top_k}", f"give at most {within}, the experts of {topk_groups} groups")


def _check_place(parameter: str, tensor: Tensor, logits: Tensor) -> None:
    if tensor.device != logits.device:
        refuse(parameter, f"is on {tensor.device}", f"move it to {logits.device}, where logits is")
    check_wants_no_gradient(NAME, parameter, tensor)


def bind(
    adapter: Any,
    problem: RoutingProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a call runs: the checks, the destinations, the launch."""
    launch, calls, repeats = adapter.launch, KnownCalls(adapter.launch, reports=False), is_repeated(adapter)
    recognise: Callable[[Any, Any], int] = calls.launches if repeats else calls.holds
    top_k, num_experts, scoring = problem.top_k, problem.num_experts, problem.scoring
    num_groups, topk_groups = problem.num_groups, problem.topk_groups
    dtype, has_bias, scaled = getattr(torch, problem.dtype), problem.correction_bias, problem.scaling_factor
    float32, int32, isfinite = torch.float32, torch.int32, math.isfinite

    def known(
        logits: Tensor,
        correction_bias: Tensor | None,
        scaling_factor: float,
        out_weights: Tensor | None,
        out_ids: Tensor | None,
    ) -> bool:
        """Arguments that `check` would accept and that the kernel was made for, except groups and scoring."""
        if not usable(logits, dtype, device) or logits.ndim != 2 or type(scaling_factor) is not float:
            return False
        tokens, experts = logits.shape
        if experts != num_experts or not (isfinite(scaling_factor) if scaled else scaling_factor == 1.0):
            return False
        if forward_ad._current_level >= 0 or tracing_state() is not None:
            return False
        dense = logits.is_contiguous()
        if not dense and not is_plain_view(logits):
            return False
        if experts == 1 and (logits.is_neg() or (correction_bias is not None and correction_bias.is_neg())):
            return False  # one element is contiguous whatever it is a view of
        if correction_bias is None:
            if has_bias:
                return False
        elif not (has_bias and alike(correction_bias, (experts,), float32, device) and correction_bias.is_contiguous()):
            return False
        if out_weights is None and out_ids is None:
            return True
        chosen = (tokens, top_k)
        begin = logits.data_ptr()
        end = begin + logits.nbytes if dense else span_of(logits)[1]
        of_weights = weights_end = 0
        if out_weights is not None:
            if not alike(out_weights, chosen, float32, device) or not out_weights.is_contiguous():
                return False
            of_weights = out_weights.data_ptr()
            weights_end = of_weights + out_weights.nbytes
            if of_weights < end and begin < weights_end:
                return False
            if (
                correction_bias is not None
                and -correction_bias.nbytes < correction_bias.data_ptr() - of_weights < out_weights.nbytes
            ):
                return False
        if out_ids is not None:
            if not alike(out_ids, chosen, int32, device) or not out_ids.is_contiguous():
                return False
            of_ids = out_ids.data_ptr()
            ids_end = of_ids + out_ids.nbytes
            if (of_ids < end and begin < ids_end) or (of_ids < weights_end and of_weights < ids_end):
                return False
            if (
                correction_bias is not None
                and -correction_bias.nbytes < correction_bias.data_ptr() - of_ids < out_ids.nbytes
            ):
                return False
        return True

    def made(logits: Tensor, weights: Tensor | None, ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """The destinations, as given or new."""
        rows = logits.shape[0]
        if weights is None:
            weights = logits.new_empty(rows, top_k, dtype=float32)
        return weights, logits.new_empty(rows, top_k, dtype=int32) if ids is None else ids

    def run(
        logits: Tensor,
        correction_bias: Tensor | None,
        scaling_factor: float,
        out_weights: Tensor | None,
        out_ids: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        if logits.get_device() != device:
            result: tuple[Tensor, Tensor] = elsewhere(logits.get_device())(
                logits, correction_bias, scaling_factor, out_weights, out_ids
            )
            return result
        try:
            key, state = None, 0
            if type(scaling_factor) is float and not logits.is_nested:
                key = logits.shape, scaling_factor
                if key in calls and dense(logits, dtype, device):
                    weights, ids = made(logits, out_weights, out_ids)
                    state = recognise(key, (logits, correction_bias, weights, ids))
                    if state == 2:
                        tick()
                        return weights, ids
            if not state:
                if not known(logits, correction_bias, scaling_factor, out_weights, out_ids):
                    examine(logits, correction_bias, scaling_factor, out_weights, out_ids)
                weights, ids = made(logits, out_weights, out_ids)
                calls.learn(key, (logits, correction_bias, weights, ids), 2)
            if logits.shape[0]:
                launched = logits, correction_bias, float(scaling_factor), weights, ids
                tick()
                launch(*launched)
                if state and repeats:
                    calls.attach(key, (logits, correction_bias, weights, ids), adapter.repeated, *launched)
            return weights, ids
        except InvalidArgument:
            raise
        except Exception as error:
            failed(launch, error)
            # Names an operand that no kernel can read, such as one that torch transforms.
            examine(logits, correction_bias, scaling_factor, out_weights, out_ids)
            raise

    def examine(
        logits: Tensor,
        correction_bias: Tensor | None,
        scaling_factor: float,
        out_weights: Tensor | None,
        out_ids: Tensor | None,
    ) -> None:
        """Everything that the contract says of a call, and what the kernel was made for."""
        rest = (correction_bias, scaling_factor, out_weights, out_ids)
        check(logits, top_k, scoring, num_groups, topk_groups, *rest)
        if logits.dtype is not dtype or logits.shape[1] != num_experts:
            refuse("logits", f"is {describe(logits)}", f"the plan is for {problem.dtype} [T, {num_experts}]")
        if (correction_bias is not None) is not has_bias:
            given, wanted = ("without", "with") if has_bias else ("with", "without")
            refuse("correction_bias", f"comes {given} a bias", f"the plan is for a routing {wanted} one")
        if (scaling_factor != 1.0) and not scaled:
            refuse("scaling_factor", f"is {scaling_factor}", "the plan is for a routing without a factor")

    return run


_op: Op[RoutingProblem] = Op(
    Contract.of(
        ROUTE_EXPERTS,
        problem_of=problem_of,
        adapter=RoutingAdapter,
        bind=bind,
        reference=route_experts_reference,
        example="kernelhub.ops.moe.routing.inputs:routing_inputs",
    )
)
_get = _op.table.get
_GROUPS = (int, type(None))
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class RoutingPlan(CallPlan):
    """A kernel selected for logits like these: ``run(logits, correction_bias=None, ...)`` is a whole call.

    Everything but tensors is as it was prepared.
    """

    __slots__ = ()
    call = "logits, correction_bias, scaling_factor, out_weights, out_ids"
    fixed: ClassVar[Fixed] = {
        "top_k": attrgetter("top_k"),
        "scoring": attrgetter("scoring"),
        "num_groups": attrgetter("num_groups"),
        "topk_groups": attrgetter("topk_groups"),
        "renormalize": attrgetter("renormalize"),
    }
    kept = ("scaling_factor",)


def _memory(logits: Tensor, top_k: int, **options: Any) -> dict[str, Tensor]:
    shape = (logits.shape[0], top_k)
    weights = logits.new_empty(shape, dtype=torch.float32)
    return {"out_weights": weights, "out_ids": logits.new_empty(shape, dtype=torch.int32)}


@publish(_op, prepares(_op, RoutingPlan), traced=Traced(_memory, ("out_weights", "out_ids")))
def route_experts(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    num_groups: int | None = None,
    topk_groups: int | None = None,
    correction_bias: Tensor | None = None,
    renormalize: bool = False,
    scaling_factor: float = 1.0,
    out_weights: Tensor | None = None,
    out_ids: Tensor | None = None,
    backend: Backend = None,
) -> tuple[Tensor, Tensor]:
    """Select the experts of each token and their weights.

    Scores are computed in float32. Experts are ranked by score plus `correction_bias`; without a bias by their
    logits, because every score is a monotone function of them, so that ids are exact. Among equals the lowest id ranks
    first. A NaN logit counts as -inf, and +inf as the largest float32. A token whose logits are all -inf goes to the
    first experts with weight zero. Ids are always valid, and those of one token are distinct.

    Args:
        logits: ``[T, E]``, float32, float16 or bfloat16.
        top_k: experts per token, 1 to E.
        scoring: ``"softmax"`` over all experts, ``"sigmoid"`` of each, or ``"softmax_after_topk"`` over the selected.
        num_groups: number of groups of consecutive experts, all of the same size. A token uses experts of only
            `topk_groups` groups. Groups are ranked by their best expert, or with a bias by the sum of their best two.
            None, 0 and 1 mean no groups.
        topk_groups: number of groups per token.
        correction_bias: float32 ``[E]``, added for ranking only.
        renormalize: divide the selected weights by their sum: after ``"softmax"`` exactly, however small it is; after
            ``"sigmoid"`` by the sum plus 1e-20, as DeepSeek-V3's own code does; after ``"softmax_after_topk"`` the sum
            is one already.
        scaling_factor: factor of the weights, applied last.
        out_weights: destination of the weights, float32 ``[T, top_k]``.
        out_ids: destination of the ids, int32 ``[T, top_k]``.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        Weights, float32, and ids, int32, both ``[T, top_k]``, best first.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.

    Source:
        DeepSeek-V2 (2024), section 2.1.2, and DeepSeek-V3 (2024), section 2.1.2; grouped_topk of vLLM and
        biased_grouped_topk of SGLang; the routers of Hugging Face transformers, which the tests compare it with.

    Example:
        >>> import torch, kernelhub
        >>> weights, ids = kernelhub.route_experts(torch.tensor([[1.0, 3.0, 2.0, 3.0]]), 2, renormalize=True)
        >>> weights.tolist(), ids.tolist()
        ([[0.5, 0.5]], [[1, 3]])
    """
    if type(logits) is not Tensor and isinstance(logits, Tensor) and not isinstance(backend, DryRun):
        return cast(tuple[Tensor, Tensor], _op.traced(**locals()))
    if _op.again is not None:
        again: tuple[Tensor, Tensor] | None = _op.again(
            logits,
            top_k,
            scoring,
            num_groups,
            topk_groups,
            correction_bias,
            renormalize,
            scaling_factor,
            out_weights,
            out_ids,
            backend,
        )
        if again is not None:
            return again
    try:
        if type(renormalize) is not bool:
            renormalize = check_flag(NAME, "renormalize", renormalize)
        if type(top_k) is not int or type(num_groups) not in _GROUPS or type(topk_groups) not in _GROUPS:
            top_k, num_groups, topk_groups = map(python_value, (top_k, num_groups, topk_groups))
            if type(top_k) is not int or type(num_groups) not in _GROUPS or type(topk_groups) not in _GROUPS:
                raise TypeError
        key = (
            logits.dtype,
            logits.shape[1],
            top_k,
            scoring,
            *groups_of(num_groups, topk_groups),
            correction_bias is not None,
            renormalize,
            scaling_factor != 1.0,
        )
        hash(key)
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        rest = (correction_bias, scaling_factor, out_weights, out_ids, renormalize)
        check(logits, top_k, scoring, num_groups, topk_groups, *rest)
        raise
    run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
    if run is None:
        rest = (correction_bias, scaling_factor, out_weights, out_ids, renormalize)
        check(logits, top_k, scoring, num_groups, topk_groups, *rest)
        run = _op.decide(key, logits.get_device(), backend)
    result: tuple[Tensor, Tensor] = run(logits, correction_bias, scaling_factor, out_weights, out_ids)
    return result
