"""How a call of `route_experts` becomes a launch: its problem, its checks, its run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kernelhub.dispatch.lost import failed
from kernelhub.errors import InvalidArgument
from kernelhub.ops.arguments import alike, check_wants_no_gradient, describe, dtype_name, usable
from kernelhub.ops.moe.routing.problem import FLOATS, SCORINGS, SOFTMAX_AFTER_TOPK, RoutingProblem
from kernelhub.ops.operands import (
    check_destination,
    check_flag,
    check_operand,
    is_plain_view,
    span_of,
    tracing_state,
)
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
        scaling_factor=scaled,
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
    if type(top_k) is not int or not 1 <= top_k <= num_experts:
        refuse("top_k", f"is {top_k!r}", f"give 1 to {num_experts}, as logits have {num_experts} experts")
    _check_groups(num_experts, top_k, num_groups, topk_groups)
    check_flag(NAME, "renormalize", renormalize)
    if isinstance(scaling_factor, bool) or not isinstance(scaling_factor, float | int):
        refuse("scaling_factor", f"is {type(scaling_factor).__name__}", "give a float")
    if not math.isfinite(scaling_factor):
        refuse("scaling_factor", f"is {scaling_factor}", "give a finite float")
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
    launch = adapter.launch
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
        """Nothing that `check` would refuse, and what the kernel was made for; groups and scoring it knows."""
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
            if not known(logits, correction_bias, scaling_factor, out_weights, out_ids):
                examine(logits, correction_bias, scaling_factor, out_weights, out_ids)
            shape = (logits.shape[0], top_k)
            if out_weights is None:
                out_weights = logits.new_empty(shape, dtype=float32)
            if out_ids is None:
                out_ids = logits.new_empty(shape, dtype=int32)
            if shape[0]:
                tick()
                launch(logits, correction_bias, float(scaling_factor), out_weights, out_ids)
            return out_weights, out_ids
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
