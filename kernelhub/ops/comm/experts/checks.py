"""Checks of the contracts of `moe_dispatch` and `moe_combine`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernelhub.ops.arguments import check_wants_no_gradient, describe, dtype_name, refuse
from kernelhub.ops.comm.experts.problem import BLOCK, EXACT, FIXED, FORMATS, FP8, ROWS, DispatchProblem, capacity_of
from kernelhub.ops.comm.experts.received import Dispatched, Header, header_of, is_handle
from kernelhub.ops.comm.experts.results import forms_of, header_of_capacity, places_of
from kernelhub.ops.comm.group import resolved
from kernelhub.ops.comm.problem import FLOATS
from kernelhub.ops.operands import check_count, check_destination, check_operand
from kernelhub.ops.ready import Form

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DISPATCH, COMBINE = "moe_dispatch", "moe_combine"
_FLOATS = tuple(getattr(torch, name) for name in FLOATS)
_PAYLOADS = (*_FLOATS, torch.float8_e4m3fn)


def check_dispatch(
    x: Any,
    topk_ids: Any,
    topk_weights: Any,
    group: Any,
    num_experts: Any,
    scales: Any,
    format: Any,
    max_tokens: Any,
    out: Any = None,
) -> ProcessGroup:
    """Everything that the contract says of a dispatch; returns the group."""
    check_operand(DISPATCH, "x", x)
    if x.ndim != 2 or not x.shape[1]:
        refuse(DISPATCH, "x", f"has shape {list(x.shape)}", "give [T, H] with at least one column")
    if x.dtype not in _PAYLOADS:
        refuse(DISPATCH, "x", f"has dtype {dtype_name(x.dtype)}", f"give {', '.join((*FLOATS, FP8))}")
    check_wants_no_gradient(DISPATCH, "x", x)
    tokens = x.shape[0]
    for parameter, given, dtype in (
        ("topk_ids", topk_ids, torch.int32),
        ("topk_weights", topk_weights, torch.float32),
    ):
        check_operand(DISPATCH, parameter, given)
        if given.ndim != 2 or given.shape[0] != tokens or not given.shape[1] or given.dtype is not dtype:
            refuse(DISPATCH, parameter, f"is {describe(given)}", f"give {dtype_name(dtype)} [{tokens}, top_k]")
        _check_place(DISPATCH, parameter, given, x)
    if topk_ids.shape != topk_weights.shape:
        fix = f"topk_ids has {topk_ids.shape[1]} columns"
        refuse(DISPATCH, "topk_weights", f"has {topk_weights.shape[1]} columns", fix)
    _check_scales(x, scales)
    pg = resolved(DISPATCH, group)
    check_count(DISPATCH, "num_experts", num_experts, 1, fix="give the number of experts of all ranks")
    if num_experts % pg.size():
        fix = f"give a multiple of {pg.size()}, the ranks of group; ids of experts that do not exist may fill it up"
        refuse(DISPATCH, "num_experts", f"is {num_experts}", fix)
    if format not in FORMATS:
        refuse(DISPATCH, "format", f"is {format!r}", f"give one of {', '.join(FORMATS)}")
    if max_tokens is not None:
        fix = "give the most tokens of any rank, the same number on every rank, or None"
        check_count(DISPATCH, "max_tokens", max_tokens, 1, fix=fix)
        check_room(tokens, max_tokens)
    if out is not None:
        if max_tokens is None:
            fix = "give max_tokens: the shapes of the result follow from it"
            refuse(DISPATCH, "out", "is given without max_tokens", fix)
        top_k, columns = topk_ids.shape[1], 0 if scales is None else scales.shape[1]
        header = header_of_capacity(format, FIXED, pg.size(), num_experts, top_k, tokens, max_tokens)
        forms = forms_of(header, x.shape[1], top_k, columns, x.dtype)
        operands = {"x": x, "topk_ids": topk_ids, "topk_weights": topk_weights, "scales": scales}
        _check_out(out, format, forms, operands)
    return pg


def _check_out(out: Any, format: str, forms: Mapping[str, Form | None], operands: Mapping[str, Any]) -> None:
    """A result of an earlier call like this one, whose memory is its own."""
    x, apart = operands["x"], dict(operands)
    places = places_of(out, format)
    if places is None:
        refuse(DISPATCH, "out", f"is {type(out).__name__}, not of such a call", _fix_of(format))
    for (name, form), place in zip(forms.items(), places, strict=True):
        parameter = f"out.{name}"
        if form is None:
            if place is not None:
                refuse(DISPATCH, parameter, "is given", f"such a call in format {format} has none: give None")
            continue
        check_destination(DISPATCH, parameter, place, form.shape, form.dtype, x.device, apart)
        if not place.is_contiguous():
            refuse(DISPATCH, parameter, f"has strides {list(place.stride())}", "give a contiguous tensor")
        apart[parameter] = place


def check_like(out: Any, sent: Dispatched, format: str) -> None:
    """The same in traced code, where tensors have no memory: an earlier result has the form of this one."""
    places, parts = places_of(out, format), places_of(sent, format)
    if places is None or parts is None:
        refuse(DISPATCH, "out", f"is {type(out).__name__}, not of such a call", _fix_of(format))
    for place, part in zip(places, parts, strict=True):
        given = None if place is None else (tuple(place.shape), place.dtype, place.device)
        wanted = None if part is None else (tuple(part.shape), part.dtype, part.device)
        if given != wanted:
            refuse(DISPATCH, "out", f"has {given}", f"such a call has {wanted}")


def _fix_of(format: str) -> str:
    return f"give what moe_dispatch returned in format {format}, or the plan's results()"


def check_room(tokens: int, max_tokens: int) -> None:
    """This rank's tokens fit the capacity."""
    if tokens > max_tokens:
        fix = f"max_tokens is {max_tokens}: split the batch, or prepare a plan for more on every rank"
        refuse(DISPATCH, "x", f"has {tokens} tokens", fix)


def _check_scales(x: Tensor, scales: Any) -> None:
    if (x.dtype is torch.float8_e4m3fn) != (scales is not None):
        how = "is missing" if scales is None else "is given"
        refuse(DISPATCH, "scales", how, f"x is {dtype_name(x.dtype)}; scales belong to {FP8}")
    if scales is None:
        return
    check_operand(DISPATCH, "scales", scales)
    shape = [x.shape[0], -(-x.shape[1] // BLOCK)]
    if scales.dtype is not torch.float32 or list(scales.shape) != shape:
        fix = f"give float32 {shape}, one per row and {BLOCK} columns"
        refuse(DISPATCH, "scales", f"is {describe(scales)}", fix)
    _check_place(DISPATCH, "scales", scales, x)


def _check_place(op: str, parameter: str, given: Tensor, x: Tensor) -> None:
    if given.device != x.device:
        refuse(op, parameter, f"is on {given.device}", f"move it to {x.device}")
    check_wants_no_gradient(op, parameter, given)


def check_problem(problem: DispatchProblem, dispatch: Sequence[Any]) -> None:
    """A plan is run with what it was prepared for; `dispatch` as of `check_dispatch`, the group resolved."""
    x, topk_ids, _, group, num_experts, _, format, max_tokens, _ = dispatch
    for parameter, given, wanted in (
        ("x", dtype_name(x.dtype), problem.dtype),
        ("x", x.shape[1], problem.hidden_size),
        ("topk_ids", topk_ids.shape[1], problem.top_k),
        ("num_experts", num_experts, problem.num_experts),
        ("group", group.size(), problem.world_size),
        ("format", format, problem.format),
        ("max_tokens", capacity_of(max_tokens), problem.capacity),
    ):
        if given != wanted:
            refuse(DISPATCH, parameter, f"makes {given}", f"the plan is for {wanted}")


def check_combine(y: Any, handle: Any, group: Any, out: Any) -> tuple[ProcessGroup, Header]:
    """Everything that the contract says of a combine; returns the group and the handle's header."""
    check_operand(COMBINE, "y", y)
    if y.dtype not in _FLOATS:
        refuse(COMBINE, "y", f"has dtype {dtype_name(y.dtype)}", f"give {', '.join(FLOATS)}")
    check_wants_no_gradient(COMBINE, "y", y)
    pg = resolved(COMBINE, group)
    if not is_handle(handle):
        refuse(COMBINE, "handle", "is no handle", "give the handle that moe_dispatch returned")
    header = header_of(handle)
    if header.world_size != pg.size():
        refuse(COMBINE, "group", f"has {pg.size()} ranks", f"the tokens were dispatched in one of {header.world_size}")
    for part in handle[1:4]:
        if part.device != y.device:
            refuse(COMBINE, "y", f"is on {y.device}", f"the tokens were dispatched on {part.device}")
    if tuple(y.shape[:-1]) != header.y_shape or y.ndim != len(header.y_shape) + 1 or not y.shape[-1]:
        wanted = ", ".join(map(str, header.y_shape))
        fix = f"give [{wanted}, H], a row for each of the dispatched x ({FORMATS[header.format]})"
        refuse(COMBINE, "y", f"has shape {list(y.shape)}", fix)
    if out is not None:
        shape = (header.tokens, y.shape[-1])
        read = {f"handle[{at}]": handle[at] for at in (1, 2, 3)}
        check_destination(COMBINE, "out", out, shape, y.dtype, y.device, {"y": y, **read})
    return pg, header


def rows_named(header: Header) -> str:
    """Which tokens a rank received."""
    return ROWS[header.rows]


def capacity_named(header: Header) -> str:
    """The facet `capacity` of a handle."""
    return capacity_of(header.max_tokens) if header.max_tokens else EXACT
