"""How calls of the quantisers become launches: their problems, their runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.arguments import alike, describe, dtype_name, usable
from kernelhub.ops.formats import E4M3, E8M0
from kernelhub.ops.quant.arguments import (
    E8M0_BYTES,
    any_rows,
    as_rows,
    check_codes,
    check_like,
    check_one,
    check_tensor,
    check_x,
    fp8_scale_shape,
    new_scale,
    refuse,
)
from kernelhub.ops.quant.problem import (
    BLOCK,
    FP8_SCALES,
    GRANULARITIES,
    GROUP,
    MX_GROUP,
    NVFP4_GROUP,
    TENSOR,
    TOKEN,
    DequantizeFp8Problem,
    DequantizeProblem,
    QuantizeFp8Problem,
    QuantizeMxProblem,
    QuantizeNvfp4Problem,
)
from kernelhub.ops.quant.reference import LEAST_GLOBAL_SCALE, LEAST_SCALE
from kernelhub.probes.device import facts_of

Run = Callable[..., Any]
Elsewhere = Callable[[int], Run]
LAYOUTS = ("row", "column")
ROUNDINGS = ("floor", "up")
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SCALE_DTYPES = tuple(getattr(torch, name) for name in FP8_SCALES)
_scale_shape = lru_cache(1024)(fp8_scale_shape)


# quantize_fp8


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


def fp8_complete(facets: dict[str, Any]) -> dict[str, Any]:
    """Scales held as float8_e8m0fnu are powers of two."""
    return {**facets, "ue8m0": True} if facets.get("scale_dtype") == "float8_e8m0fnu" else facets


def fp8_contradiction(problem: QuantizeFp8Problem) -> str | None:
    """What cannot be asked together."""
    if problem.static and problem.granularity not in (TENSOR, TOKEN):
        return f"a scale can be given for tensor and token, not for {problem.granularity}"
    if problem.static and problem.ue8m0:
        return "a scale that is given is not rounded to a power of two"
    return None


def check_fp8(x: Any, granularity: Any, group_size: Any, scale: Any, ue8m0: Any, scale_dtype: Any, layout: Any) -> None:
    """Everything that the contract says of a call but its destinations."""
    op = "quantize_fp8"
    if granularity not in GRANULARITIES:
        refuse(op, "granularity", f"is {granularity!r}", f"give one of {', '.join(GRANULARITIES)}")
    if type(group_size) is not int or group_size < 1:
        refuse(op, "group_size", f"is {group_size!r}", "give a positive int")
    if scale_dtype not in _SCALE_DTYPES:
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
    adapter: Any, problem: QuantizeFp8Problem, device: int, tick: Callable[[], int], elsewhere: Elsewhere
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
        shape = x.shape
        if not known(x, shape, scale):
            check_fp8(x, granularity, group_size, scale, problem.ue8m0, scale_dtype, "row")
            if x.dtype is not dtype:
                refuse(op, "x", f"has dtype {dtype_name(x.dtype)}", f"the plan is for {problem.dtype}")
            if (scale is not None) != static:
                wanted = "a scale" if static else "no scale"
                refuse(op, "scale", f"is {'missing' if scale is None else 'given'}", f"the plan is for {wanted}")
        if scale is not None:
            if out_scale is not None:
                refuse(op, "out_scale", "is given beside a scale", "the scale that is given is the result")
        else:
            scales = _scale_shape(shape, granularity, group_size)
            if out_scale is None:
                scale = new_scale(x, scales, scale_dtype, problem.column, block)
            else:
                scale = out_scale
                if not alike(scale, scales, scale_dtype, device):
                    check_like(op, "out_scale", scale, scales, (scale_dtype,), x)
        out = _destination(op, "out", out, shape, E4M3, x, device)
        if x.numel():
            if per_tensor:
                areas = scale.view(1, 1)
            elif static:
                areas = any_rows(scale.unsqueeze(-1) if scale.ndim < x.ndim else scale, False)
            else:
                areas = as_rows(op, "out_scale", scale, block)
            codes = as_rows(op, "out", out, block)
            tick()
            launch(any_rows(x, block), codes, areas, None)
        elif not problem.static:
            scale.fill_(LEAST_SCALE)
        return out, scale

    return run


# quantize_nvfp4


def nvfp4_problem(key: Any, device: int) -> QuantizeNvfp4Problem:
    """The problem that a key means; the key is built in `quantize_nvfp4`."""
    dtype, static = key
    return QuantizeNvfp4Problem(facts_of(device), dtype_name(dtype), static)


def check_nvfp4(x: Any, global_scale: Any) -> None:
    """Everything that the contract says of a call but its destinations."""
    check_x("quantize_nvfp4", x, NVFP4_GROUP)
    if global_scale is not None:
        check_one("quantize_nvfp4", "global_scale", global_scale, x)


def bind_nvfp4(
    adapter: Any, problem: QuantizeNvfp4Problem, device: int, tick: Callable[[], int], elsewhere: Elsewhere
) -> Run:
    """The function that a call of `quantize_nvfp4` runs."""
    launch, op, dtype = adapter.launch, "quantize_nvfp4", getattr(torch, problem.dtype)
    static, float32 = problem.static, torch.float32

    def known(x: Tensor, shape: tuple[int, ...], global_scale: Tensor | None) -> bool:
        """Nothing that `check_nvfp4` would refuse."""
        if not usable(x, dtype, device) or not shape or not shape[-1] or shape[-1] % NVFP4_GROUP:
            return False
        if global_scale is None or not static:
            return global_scale is None and not static
        return usable(global_scale, float32, device) and global_scale.numel() == 1

    def run(
        x: Tensor,
        global_scale: Tensor | None,
        out: Tensor | None,
        out_scale: Tensor | None,
        out_global_scale: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if x.get_device() != device:
            result: tuple[Tensor, Tensor, Tensor] = elsewhere(x.get_device())(
                x, global_scale, out, out_scale, out_global_scale
            )
            return result
        shape = x.shape
        if not known(x, shape, global_scale):
            check_nvfp4(x, global_scale)
            if x.dtype is not dtype:
                refuse(op, "x", f"has dtype {dtype_name(x.dtype)}", f"the plan is for {problem.dtype}")
            if (global_scale is not None) != static:
                wanted = "a global scale" if static else "no global scale"
                refuse(op, "global_scale", f"is {'missing' if static else 'given'}", f"the plan is for {wanted}")
        if global_scale is None:
            if out_global_scale is None:
                global_scale = x.new_empty(1, dtype=float32)
            else:
                global_scale = out_global_scale
                if not alike(global_scale, (1,), float32, device):
                    check_one(op, "out_global_scale", global_scale, x)
        elif out_global_scale is not None:
            refuse(op, "out_global_scale", "is given beside global_scale", "the one that is given is the result")
        *lead, width = shape
        out = _destination(op, "out", out, (*lead, width // 2), torch.uint8, x, device)
        out_scale = _destination(op, "out_scale", out_scale, (*lead, width // NVFP4_GROUP), E4M3, x, device)
        if x.numel():
            codes, scale = as_rows(op, "out", out, False), as_rows(op, "out_scale", out_scale, False)
            tick()
            launch(any_rows(x, False), codes, scale, global_scale)
        elif not problem.static:
            global_scale.fill_(LEAST_GLOBAL_SCALE)
        return out, out_scale, global_scale

    return run


# quantize_mxfp4, quantize_mxfp8


def mx_problem(key: Any, device: int) -> QuantizeMxProblem:
    """The problem that a key means; the key is built in `quantize_mxfp4` and `quantize_mxfp8`."""
    dtype, round_up = key
    return QuantizeMxProblem(facts_of(device), dtype_name(dtype), round_up)


def check_mx(op: str, x: Any, scale_rounding: Any) -> None:
    """Everything that the contract says of a call but its destinations."""
    if scale_rounding not in ROUNDINGS:
        refuse(op, "scale_rounding", f"is {scale_rounding!r}", "give 'floor' or 'up'")
    check_x(op, x, MX_GROUP if op == "quantize_mxfp4" else 1)


def bind_mx(op: str) -> Callable[..., Run]:
    """What binds a kernel of `quantize_mxfp4` or `quantize_mxfp8`."""
    fp4 = op == "quantize_mxfp4"

    def bind(
        adapter: Any, problem: QuantizeMxProblem, device: int, tick: Callable[[], int], elsewhere: Elsewhere
    ) -> Run:
        launch, dtype = adapter.launch, getattr(torch, problem.dtype)
        multiple, per_byte, codes_dtype = (MX_GROUP, 2, torch.uint8) if fp4 else (1, 1, E4M3)

        def run(x: Tensor, out: Tensor | None, out_scale: Tensor | None) -> tuple[Tensor, Tensor]:
            if x.get_device() != device:
                result: tuple[Tensor, Tensor] = elsewhere(x.get_device())(x, out, out_scale)
                return result
            shape = x.shape
            if not usable(x, dtype, device) or not shape or not shape[-1] or shape[-1] % multiple:
                check_mx(op, x, "floor")
                if x.dtype is not dtype:
                    refuse(op, "x", f"has dtype {dtype_name(x.dtype)}", f"the plan is for {problem.dtype}")
            *lead, width = shape
            out = _destination(op, "out", out, (*lead, width // per_byte), codes_dtype, x, device)
            out_scale = _destination(op, "out_scale", out_scale, (*lead, -(-width // MX_GROUP)), E8M0, x, device)
            if x.numel():
                codes, scale = as_rows(op, "out", out, False), as_rows(op, "out_scale", out_scale, False)
                tick()
                launch(any_rows(x, False), codes, scale, None)
            return out, out_scale

        return run

    return bind


# dequantize_*


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
    """What shares a scale, told from the shapes; where two readings fit, they are the same."""
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
    check_tensor(op, "scale", scale, _SCALE_DTYPES, x)
    if type(group_size) is not int or group_size < 1:
        refuse(op, "group_size", f"is {group_size!r}", "give a positive int")
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
    """What binds a kernel of one of the dequantisers."""
    fp4, nvfp4 = op in ("dequantize_nvfp4", "dequantize_mxfp4"), op == "dequantize_nvfp4"

    def bind(adapter: Any, problem: Any, device: int, tick: Callable[[], int], elsewhere: Elsewhere) -> Run:
        launch, out_dtype = adapter.launch, getattr(torch, problem.out_dtype)
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
                    else alike(scale, _scale_shape(shape, granularity, group_size), scale_dtype, device)
                )
            if not alike(scale, (*shape[:-1], -(-shape[-1] // per_group)), scale_dtype, device):
                return False
            return not nvfp4 or (usable(global_scale, torch.float32, device) and global_scale.numel() == 1)

        def run(x: Tensor, scale: Tensor, global_scale: Tensor | None, out: Tensor | None) -> Tensor:
            if x.get_device() != device:
                result: Tensor = elsewhere(x.get_device())(x, scale, global_scale, out)
                return result
            shape = x.shape
            if not known(x, shape, scale, global_scale):
                if is_fp8:
                    check_dequantize_fp8(x, scale, group_size, out_dtype)
                    if not fits(x.shape, scale.shape, granularity, group_size) or scale.dtype is not scale_dtype:
                        wanted = f"{problem.scale_dtype} scales, one per {granularity}"
                        refuse(op, "scale", f"is {describe(scale)}", f"the plan is for {wanted}")
                else:
                    check_dequantize(op, x, scale, global_scale, out_dtype)
                if fp4:
                    x = x.view(torch.uint8)
            out = _destination(op, "out", out, (*shape[:-1], shape[-1] * 2) if fp4 else shape, out_dtype, x, device)
            if x.numel():
                if per_tensor:
                    areas = scale.reshape(1, 1)
                else:
                    areas = any_rows(scale.unsqueeze(-1) if scale.ndim < x.ndim else scale, block)
                values = as_rows(op, "out", out, block)
                tick()
                launch(any_rows(x, block), areas, global_scale, values)
            return out

        return run

    return bind


def _check_out_dtype(op: str, out_dtype: Any) -> None:
    if out_dtype not in _OUT_DTYPES:
        refuse(op, "out_dtype", f"is {out_dtype}", "give torch.bfloat16, torch.float16 or torch.float32")


def _destination(
    op: str, parameter: str, given: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, x: Tensor, device: int
) -> Tensor:
    """What was given, if it fits, else new memory."""
    if given is None:
        return x.new_empty(tuple(shape), dtype=dtype)
    if not alike(given, shape, dtype, device):
        check_like(op, parameter, given, shape, (dtype,), x)
    return given
