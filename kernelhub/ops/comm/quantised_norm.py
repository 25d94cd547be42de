"""Calls of `all_reduce_rms_norm` whose result is quantised: their checks, and the function that a call runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernelhub.dispatch.hub import HUB
from kernelhub.ops.arguments import dense, describe, refuse
from kernelhub.ops.comm.all_reduce import same_place
from kernelhub.ops.comm.comparing import comparing
from kernelhub.ops.comm.known import GroupCalls, group_type
from kernelhub.ops.comm.preparing import TIMEOUT
from kernelhub.ops.comm.problem import AllReduceRmsNormProblem
from kernelhub.ops.comm.refusing import failed_launch
from kernelhub.ops.fused_quant.formats import Results, check_format
from kernelhub.ops.operands import check_destination

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FORM = ("format", "scale_dtype", "ue8m0", "column")  # facets of the form of the norm, in the order of a key
_NAMES = ("x", "residual", "weight", "scale", "global_scale")
CheckOperands = Callable[[Any, Any, Any, Any, Any], "ProcessGroup"]


def normed(x: Tensor, weight: Tensor, eps: float, problem: AllReduceRmsNormProblem) -> dict[str, Any]:
    """What of a call, quantised or not, must be equal on all ranks, as plain values."""
    form = {name: getattr(problem, name) for name in FORM}
    return {"x": describe(x), "weight": describe(weight), "eps": float(eps), **form}


def check_results(
    op: str,
    results: Results,
    read: tuple[Tensor | None, ...],
    out: Tensor | None,
    out_scale: Tensor | None,
    residual_out: Tensor | None,
) -> None:
    """Refuse destinations that do not fit, or share memory with what `read`, by `_NAMES`, holds or with each other."""
    x, residual, *others = read
    assert x is not None
    results.check(tuple(x.shape), out, out_scale, _NAMES, read)
    if residual_out is not None:
        beside: dict[str, Any] = {"x": x, "residual": residual}
        operands = {name: tensor for name, tensor in beside.items() if not same_place(tensor, residual_out)}
        named = dict(zip((*_NAMES[2:], "out", "out_scale"), (*others, out, out_scale), strict=True))
        operands |= {name: tensor for name, tensor in named.items() if tensor is not None}
        check_destination(op, "residual_out", residual_out, x.shape, x.dtype, x.device, operands)


def bind_quantised(
    op: str,
    check_operands: CheckOperands,
    adapter: Any,
    problem: AllReduceRmsNormProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a call runs; a rank without rows launches, too.

    Args:
        op: name of the op.
        check_operands: everything that the contract says of x, residual, weight, eps and group; it returns the group.
        adapter, problem, device, tick, elsewhere: as of the op's `bind`.
    """
    launch, timeout_s, groups = adapter.launch, HUB.settings[TIMEOUT], group_type()
    results, known = Results(op, problem, device), GroupCalls(adapter)
    compare = comparing(op, adapter, timeout_s)
    dtype, weight_dtype = getattr(torch, problem.dtype), getattr(torch, problem.weight_dtype)
    scale_dtype, column = getattr(torch, problem.scale_dtype), "column" if problem.column else "row"
    world_size, hidden_size, form = problem.world_size, problem.hidden_size, problem.format

    def check(read: tuple[Any, ...], eps: Any, group: Any, places: tuple[Any, ...]) -> ProcessGroup | None:
        """The group; None if the call is of another device than the plan."""
        x, residual, weight, scale, global_scale = read
        pg = check_operands(x, residual, weight, eps, group)
        check_format(op, x, x.shape[-1], form, scale, global_scale, problem.ue8m0, scale_dtype, column)
        if x.get_device() != device:
            return None
        if x.dtype is not dtype or x.shape[-1] != hidden_size:
            refuse(op, "x", f"is {describe(x)}", f"the plan is for {problem.dtype} [..., {hidden_size}]")
        if weight.dtype is not weight_dtype:
            refuse(op, "weight", f"is {describe(weight)}", f"the plan is for {problem.weight_dtype}")
        check_results(op, results, read, *places)
        return pg

    def run(
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        group: ProcessGroup | str,
        out: Tensor | None,
        residual_out: Tensor | None,
        scale: Tensor | None,
        global_scale: Tensor | None,
        out_scale: Tensor | None,
    ) -> Any:
        key: Any = None
        read: tuple[Any, ...] = ()
        again, whole, made, added = 0, out, out_scale, residual_out
        if type(group) is groups and type(eps) is float and not getattr(x, "is_nested", True):
            in_x, in_residual = residual_out is x, residual_out is residual  # which a form has once
            key = (x.shape, eps, in_x, in_residual, out is None, out_scale is None, residual_out is None)
            read = (None if in_x else x, None if in_residual else residual, weight, scale, global_scale)
            calls = known.of(group)
            ready = calls.results.get(key)
            if ready is not None:
                given = ready.take()
                if calls.launches(key, (*read, *given)) == 2:
                    tick()
                    return given
            if key in calls and dense(x, dtype, device):
                whole, made = results.completed(x, tuple(x.shape), out, out_scale)
                added = x.new_empty(x.shape) if residual_out is None else residual_out
                again = known.again(calls, key, (*read, whole, made, added))
                if again == 2:
                    tick()
                    if out is out_scale is residual_out is None and made is not None and made.is_contiguous():
                        assert whole is not None
                        known.make_ready(calls, key, whole, made, added)
                    return results.returned(whole, made, scale, added)
        if again:
            pg: Any = group
        else:
            places = (out, out_scale, residual_out)
            pg = check((x, residual, weight, scale, global_scale), eps, group, places)
            if pg is None:
                there = elsewhere(x.get_device())
                return there(x, residual, weight, eps, group, out, residual_out, scale, global_scale, out_scale)
            if pg.size() != world_size:
                refuse(op, "group", f"has {pg.size()} ranks", f"the plan is for {world_size}")
            whole, made = results.completed(x, tuple(x.shape), out, out_scale)
            added = x.new_empty(x.shape) if residual_out is None else residual_out
            if key is not None:
                all_fresh = out is out_scale is residual_out is None and made is not None
                calls.learn(key, (*read, whole, made, added), 3, 3 if all_fresh else 0)
        assert whole is not None
        assert added is not None
        codes, scales = results.rows(whole, made)
        given_scale = results.given(scale, global_scale)
        launched = (x, residual, weight, float(eps), codes, added, pg, timeout_s, given_scale, scales)
        if compare is not None:
            compare(pg, normed(x, weight, eps, problem))
        tick()
        try:
            launch(*launched)
        except Exception as error:
            failed_launch(launch, error)
            raise
        if again:
            known.attach(calls, key, (*read, whole, made, added), *launched)
        return results.returned(whole, made, scale, added)

    return run
