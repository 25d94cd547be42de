"""How a call of `quantize_fp8` becomes a launch: its problem, its checks, its run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.lost import failed
from kernelhub.ops.arguments import alike, dtype_name, refuse, usable
from kernelhub.ops.formats import E4M3
from kernelhub.ops.operands import check_flag, check_loose, check_operand, check_own_memory, transformed
from kernelhub.ops.quant.arguments import (
    FP8_SCALE_DTYPES,
    any_rows,
    as_rows,
    check_like,
    check_one,
    check_tensor,
    check_x,
    destination,
    new_scale,
    scale_shape_of_call,
    shape_of,
)
from kernelhub.ops.quant.problem import BLOCK, GRANULARITIES, TENSOR, TOKEN, QuantizeFp8Problem
from kernelhub.ops.quant.reference import LEAST_SCALE
from kernelhub.probes.device import facts_of

Run = Callable[..., Any]
LAYOUTS = ("row", "column")
_READ, _WRITTEN = ("x", "scale"), ("x", "out_scale")


def fp8_problem(key: Any, device: int) -> QuantizeFp8Problem:
    """The problem that a key means; the key is built in `quantize_fp8`."""
    dtype, granularity, group_size, scale_dtype, ue8m0, static, column = key
    return QuantizeFp8Problem(
        facts_of(device),
        dtype_name(dtype),
        granularity,
        group_size,
        dtype_name(scale_dtype),
        ue8m0,
        static,
        column,
    )


def check_fp8(x: Any, granularity: Any, group_size: Any, scale: Any, ue8m0: Any, scale_dtype: Any, layout: Any) -> None:
    """Everything that the contract says of a call but its destinations."""
    op = "quantize_fp8"
    if granularity not in GRANULARITIES:
        refuse(op, "granularity", f"is {granularity!r}", f"give one of {', '.join(GRANULARITIES)}")
    if type(group_size) is not int or group_size < 1:
        refuse(op, "group_size", f"is {group_size!r}", "give a positive int")
    check_flag(op, "ue8m0", ue8m0)
    if scale_dtype not in FP8_SCALE_DTYPES:
        refuse(op, "scale_dtype", f"is {scale_dtype}", "give torch.float32 or torch.float8_e8m0fnu")
    if layout not in LAYOUTS:
        refuse(op, "scale_layout", f"is {layout!r}", "give 'row' or 'column'")
    check_x(op, x, dims=2 if granularity == BLOCK else 1)
    if scale is None:
        return
    if granularity not in (TENSOR, TOKEN):
        refuse(op, "scale", f"is given for granularity {granularity!r}", "only tensor and token scales can be given")
    if ue8m0 or scale_dtype != torch.float32:
        refuse(op, "scale", "is given with scales to be rounded", "leave ue8m0 and scale_dtype alone")
    check_tensor(op, "scale", scale, (torch.float32,), x)
    if granularity == TENSOR:
        check_one(op, "scale", scale, x)
    elif tuple(scale.shape) not in (tuple(x.shape[:-1]), (*x.shape[:-1], 1)):
        check_like(op, "scale", scale, (*x.shape[:-1], 1), (torch.float32,), x)


def bind_fp8(
    adapter: Any, problem: QuantizeFp8Problem, device: int, tick: Callable[[], int], elsewhere: Callable[[int], Run]
) -> Run:
    """The function that a call of `quantize_fp8` runs."""
    launch, op = adapter.launch, "quantize_fp8"
    dtype, scale_dtype = getattr(torch, problem.dtype), getattr(torch, problem.scale_dtype)
    granularity, group_size, block = problem.granularity, problem.group_size, problem.granularity == BLOCK
    static, per_tensor, dims = problem.static, granularity == TENSOR, 2 if block else 1

    def known(x: Tensor, shape: tuple[int, ...], scale: Tensor | None) -> bool:
        """Nothing that `check_fp8` would refuse."""
        if not usable(x, dtype, device) or len(shape) < dims or not shape[-1]:
            return False
        if scale is None or not static:
            return scale is None and not static
        if not usable(scale, torch.float32, device):
            return False
        return scale.numel() == 1 if per_tensor else scale.shape == (*shape[:-1], 1)

    def run(x: Tensor, scale: Tensor | None, out: Tensor | None, out_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        if x.get_device() != device:
            result: tuple[Tensor, Tensor] = elsewhere(x.get_device())(x, scale, out, out_scale)
            return result
        shape = shape_of(op, x)
        if transformed() or not known(x, shape, scale):
            check_fp8(x, granularity, group_size, scale, problem.ue8m0, scale_dtype, "row")
            if x.dtype is not dtype:
                refuse(op, "x", f"has dtype {dtype_name(x.dtype)}", f"the plan is for {problem.dtype}")
            if (scale is not None) != static:
                wanted = "a scale" if static else "no scale"
                refuse(op, "scale", f"is {'missing' if scale is None else 'given'}", f"the plan is for {wanted}")
        else:
            check_loose(op, _READ[:1], (x,))
            if shape[-1] == 1 and x.is_neg():  # one element is contiguous whatever it is a view of
                check_operand(op, "x", x)
            if scale is not None and scale.is_neg():
                check_operand(op, "scale", scale)
        if scale is not None:
            if out_scale is not None:
                refuse(op, "out_scale", "is given beside a scale", "the scale that is given is the result")
        else:
            scales = scale_shape_of_call(shape, granularity, group_size)
            if out_scale is None:
                scale = new_scale(x, scales, scale_dtype, problem.column, block)
            else:
                scale = out_scale
                if not alike(scale, scales, scale_dtype, device):
                    check_like(op, "out_scale", scale, scales, (scale_dtype,), x)
                check_own_memory(op, "out_scale", scale, _READ[:1], (x,))
        out = destination(op, "out", out, shape, E4M3, device, _WRITTEN if out_scale is not None else _READ, (x, scale))
        if x.numel():
            if per_tensor:
                areas = scale.view(1, 1)
            elif static:
                areas = any_rows(scale.unsqueeze(-1) if scale.ndim < x.ndim else scale, False)
            else:
                areas = as_rows(op, "out_scale", scale, block)
            codes = as_rows(op, "out", out, block)
            tick()
            try:
                launch(any_rows(x, block), codes, areas, None)
            except Exception as error:
                failed(launch, error)
                raise
        elif not problem.static:
            scale.fill_(LEAST_SCALE)
        return out, scale

    return run
