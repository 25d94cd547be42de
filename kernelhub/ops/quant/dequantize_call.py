"""How calls of the dequantisers become launches: their problems, their checks, their run."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.lost import failed
from kernelhub.ops.arguments import alike, dense, describe, dtype_name, refuse, usable
from kernelhub.ops.formats import E4M3, E8M0
from kernelhub.ops.known_calls import KnownCalls, is_repeated
from kernelhub.ops.operands import check_count, check_loose, check_operand, transformed
from kernelhub.ops.quant.arguments import (
    E8M0_BYTES,
    FLOAT_DTYPES,
    FP8_SCALE_DTYPES,
    any_rows,
    as_rows,
    check_codes,
    check_like,
    check_one,
    check_tensor,
    destination,
    fp8_scale_shape,
    scale_shape_of_call,
    shape_of,
)
from kernelhub.ops.quant.problem import (
    BLOCK,
    GRANULARITIES,
    GROUP,
    MX_GROUP,
    NVFP4_GROUP,
    TENSOR,
    TOKEN,
    DequantizeFp8Problem,
    DequantizeProblem,
)
from kernelhub.probes.device import facts_of

Run = Callable[..., Any]
_READ = ("x", "scale", "global_scale")


def dequantize_fp8_problem(key: Any, device: int) -> DequantizeFp8Problem:
    """The problem that a key means; the key is built in `dequantize_fp8`."""
    out_dtype, granularity, group_size, scale_dtype = key
    return DequantizeFp8Problem(
        facts_of(device), dtype_name(out_dtype), granularity, group_size, dtype_name(scale_dtype)
    )


def dequantize_problem(key: Any, device: int) -> DequantizeProblem:
    """The problem that a key means; the key is built in `dequantize_nvfp4` and its like."""
    return DequantizeProblem(facts_of(device), dtype_name(key[0]))


@lru_cache(1024)
def granularity_of(shape: tuple[int, ...], scale_shape: tuple[int, ...], group_size: int) -> str:
    """The granularity, derived from the shapes; where two readings fit, they are the same."""
    return next((each for each in GRANULARITIES if fits(shape, scale_shape, each, group_size)), "")


def fits(shape: tuple[int, ...], scale_shape: tuple[int, ...], granularity: str, group_size: int) -> bool:
    """Whether scales of that shape can be those of codes of this one."""
    if granularity == TENSOR:
        return math.prod(scale_shape) == 1
    if granularity == BLOCK and len(shape) < 2:
        return False
    return tuple(scale_shape) == fp8_scale_shape(shape, granularity, group_size) or (
        granularity == TOKEN and tuple(scale_shape) == tuple(shape[:-1])
    )


def check_dequantize_fp8(x: Any, scale: Any, group_size: Any, out_dtype: Any) -> None:
    """Everything that the contract says of a call but its destination."""
    op = "dequantize_fp8"
    check_codes(op, x, False)
    check_tensor(op, "scale", scale, FP8_SCALE_DTYPES, x)
    check_count(op, "group_size", group_size, 1, fix="give a positive int")
    _check_out_dtype(op, out_dtype)
    if not granularity_of(x.shape, scale.shape, group_size):
        *lead, width = x.shape
        shapes = [[1], [*lead, 1], [*lead, -(-width // group_size)]]
        if x.ndim > 1:
            shapes.append(list(fp8_scale_shape(x.shape, BLOCK, 0)))
        refuse(op, "scale", f"has shape {list(scale.shape)}", f"give one of {', '.join(map(str, shapes))}")


def check_dequantize(op: str, x: Any, scale: Any, global_scale: Any, out_dtype: Any) -> None:
    """The same for the formats whose groups are fixed."""
    fp4, nvfp4 = op != "dequantize_mxfp8", op == "dequantize_nvfp4"
    group = NVFP4_GROUP if nvfp4 else MX_GROUP
    check_codes(op, x, fp4, group // 2 if fp4 else 1)
    groups = -(-x.shape[-1] * (2 if fp4 else 1) // group)
    check_like(op, "scale", scale, (*x.shape[:-1], groups), (E4M3,) if nvfp4 else E8M0_BYTES, x)
    if nvfp4:
        check_one(op, "global_scale", global_scale, x)
    _check_out_dtype(op, out_dtype)


def bind_dequantize(op: str) -> Callable[..., Run]:
    """The function that binds a kernel of one of the dequantisers."""
    fp4, nvfp4 = op in ("dequantize_nvfp4", "dequantize_mxfp4"), op == "dequantize_nvfp4"

    def bind(adapter: Any, problem: Any, device: int, tick: Callable[[], int], elsewhere: Callable[[int], Run]) -> Run:
        launch, out_dtype = adapter.launch, getattr(torch, problem.out_dtype)
        calls, repeats = KnownCalls(launch), is_repeated(adapter)
        recognise: Callable[[Any, Any], int] = calls.launches if repeats else calls.holds
        is_fp8 = op == "dequantize_fp8"
        group_size = problem.group_size if is_fp8 else NVFP4_GROUP if nvfp4 else MX_GROUP
        granularity = problem.granularity if is_fp8 else GROUP
        scale_dtype = getattr(torch, problem.scale_dtype) if is_fp8 else E4M3 if nvfp4 else E8M0
        dtype, per_byte = (torch.uint8, 2) if fp4 else (E4M3, 1)
        block, per_tensor = granularity == BLOCK, granularity == TENSOR
        per_group = group_size // per_byte  # columns of x; a whole number of them if two elements share a byte

        def known(x: Tensor, shape: tuple[int, ...], scale: Tensor, global_scale: Any) -> bool:
            """Nothing that the checks would refuse."""
            if not usable(x, dtype, device) or not shape or not shape[-1] or (fp4 and shape[-1] % per_group):
                return False
            if is_fp8:
                return (
                    usable(scale, scale_dtype, device) and scale.numel() == 1
                    if per_tensor
                    else alike(scale, scale_shape_of_call(shape, granularity, group_size), scale_dtype, device)
                )
            if not alike(scale, (*shape[:-1], -(-shape[-1] // per_group)), scale_dtype, device):
                return False
            return not nvfp4 or (usable(global_scale, torch.float32, device) and global_scale.numel() == 1)

        def run(x: Tensor, scale: Tensor, global_scale: Tensor | None, out: Tensor | None) -> Tensor:
            if x.get_device() != device:
                result: Tensor = elsewhere(x.get_device())(x, scale, global_scale, out)
                return result
            shape = shape_of(op, x)
            again, codes, made = 0, x, out
            if shape in calls and dense(x, dtype, device):
                if out is None:
                    made = x.new_empty(*shape[:-1], shape[-1] * per_byte, dtype=out_dtype)
                again = recognise(shape, (x, scale, global_scale, made))
                if again:
                    assert made is not None
                    out = made
                    if again == 2:
                        tick()
                        return out
            if again:
                pass
            elif transformed() or not known(x, shape, scale, global_scale):
                if is_fp8:
                    check_dequantize_fp8(x, scale, group_size, out_dtype)
                    if not fits(x.shape, scale.shape, granularity, group_size) or scale.dtype is not scale_dtype:
                        wanted = f"{problem.scale_dtype} scales, one per {granularity}"
                        refuse(op, "scale", f"is {describe(scale)}", f"the plan is for {wanted}")
                else:
                    check_dequantize(op, x, scale, global_scale, out_dtype)
                if fp4:
                    x = x.view(torch.uint8)
            else:
                check_loose(op, _READ, (x, scale, global_scale))
                factor = global_scale if nvfp4 else scale  # which may have one element, and then is always contiguous
                if factor is not None and (factor.is_neg() or factor.is_nested):
                    check_operand(op, "global_scale" if nvfp4 else "scale", factor)
            if not again:
                wide = (*shape[:-1], shape[-1] * 2) if fp4 else shape
                out = destination(op, "out", out, wide, out_dtype, device, _READ, (x, scale, global_scale))
                calls.learn(shape, (codes, scale, global_scale, out), 1)
            assert out is not None
            if x.numel():
                if per_tensor:
                    areas = scale.reshape(1, 1)
                else:
                    areas = any_rows(scale.unsqueeze(-1) if scale.ndim < x.ndim else scale, block)
                launched = any_rows(x, block), areas, global_scale, as_rows(op, "out", out, block)
                tick()
                try:
                    launch(*launched)
                except Exception as error:
                    failed(launch, error)
                    raise
                if again and repeats:
                    calls.attach(shape, (codes, scale, global_scale, out), adapter.repeated, *launched)
            return out

        return run

    return bind


def _check_out_dtype(op: str, out_dtype: Any) -> None:
    if out_dtype not in FLOAT_DTYPES:
        refuse(op, "out_dtype", f"is {out_dtype}", "give torch.bfloat16, torch.float16 or torch.float32")
