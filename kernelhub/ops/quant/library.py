"""The ops under torch.compile, torch.export and fake tensors; see `kernelhub.ops.attention.library`.

An operator may not return what it was given, so a given scale is not among its results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.dispatch.op import Backend
from kernelhub.ops.arguments import plain
from kernelhub.ops.formats import E4M3, E8M0
from kernelhub.ops.operands import check_operand
from kernelhub.ops.operators import define, names_of
from kernelhub.ops.quant.arguments import fp8_scale_shape, new_scale
from kernelhub.ops.quant.problem import BLOCK, MX_GROUP, NVFP4_GROUP

Names = list[str] | None


def _plain(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else plain(tensor)


def _check_rows(op: str, x: Tensor) -> None:
    """Where memory for results is made, or an operator has a name of its own, before the operator looks at x."""
    if x.is_nested:
        check_operand(op, "x", x)


# quantize_fp8


def quantize_fp8(
    x: Tensor,
    granularity: str = "token",
    group_size: int = 128,
    scale: Tensor | None = None,
    ue8m0: bool = False,
    scale_dtype: torch.dtype = torch.float32,
    scale_layout: str = "row",
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    backend: Backend = None,
) -> tuple[Tensor, Tensor]:
    """`kernelhub.quantize_fp8` through its operator."""
    _check_rows("quantize_fp8", x)
    form = (granularity, group_size, scale, ue8m0, scale_dtype == E8M0, scale_layout, names_of(backend))
    ops = torch.ops.kernelhub
    if out is None and out_scale is None:
        codes, made = ops.quantize_fp8.default(x, *form)
        return codes, made if scale is None else scale
    codes, made = _fp8_memory(x, *form)
    codes, made = codes if out is None else out, made if out_scale is None else out_scale
    ops.quantize_fp8_out.default(x, *form, codes, None if scale is not None and out_scale is None else made)
    return codes, made if scale is None else scale


def _fp8(
    x: Tensor,
    granularity: str,
    group_size: int,
    scale: Tensor | None,
    ue8m0: bool,
    e8m0: bool,
    layout: str,
    backend: Names,
) -> tuple[Tensor, Tensor]:
    from kernelhub.ops.quant.fp8 import quantize_fp8 as eager

    form = (granularity, group_size, _plain(scale), ue8m0, E8M0 if e8m0 else torch.float32, layout)
    codes, made = eager(plain(x), *form, backend=backend)
    return codes, made if scale is None else x.new_empty(0, dtype=torch.float32)


def _fp8_out(
    x: Tensor,
    granularity: str,
    group_size: int,
    scale: Tensor | None,
    ue8m0: bool,
    e8m0: bool,
    layout: str,
    backend: Names,
    out: Tensor,
    out_scale: Tensor | None,
) -> None:
    from kernelhub.ops.quant.fp8 import quantize_fp8 as eager

    form = (granularity, group_size, _plain(scale), ue8m0, E8M0 if e8m0 else torch.float32, layout)
    eager(plain(x), *form, out, out_scale, backend=backend)


def _fp8_memory(
    x: Tensor,
    granularity: str,
    group_size: int,
    scale: Tensor | None,
    ue8m0: bool,
    e8m0: bool,
    layout: str,
    backend: Names,
) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(x.shape, dtype=E4M3)
    if scale is not None:
        return codes, x.new_empty(0, dtype=torch.float32)
    shape = fp8_scale_shape(x.shape, granularity, group_size)
    return codes, new_scale(x, shape, E8M0 if e8m0 else torch.float32, layout == "column", granularity == BLOCK)


_FP8 = "Tensor x, str granularity, int group_size, Tensor? scale, bool ue8m0, bool e8m0, str layout, str[]? backend"
define(f"quantize_fp8({_FP8}) -> (Tensor, Tensor)", _fp8, _fp8_memory)
define(f"quantize_fp8_out({_FP8}, Tensor(a!) out, Tensor(b!)? out_scale) -> ()", _fp8_out)


# quantize_nvfp4


def quantize_nvfp4(
    x: Tensor,
    global_scale: Tensor | None = None,
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_global_scale: Tensor | None = None,
    backend: Backend = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`kernelhub.quantize_nvfp4` through its operator."""
    _check_rows("quantize_nvfp4", x)
    names, ops = names_of(backend), torch.ops.kernelhub
    if out is None and out_scale is None and out_global_scale is None:
        codes, scale, made = ops.quantize_nvfp4.default(x, global_scale, names)
        return codes, scale, made if global_scale is None else global_scale
    codes, scale, made = _nvfp4_memory(x, global_scale, names)
    codes, scale = codes if out is None else out, scale if out_scale is None else out_scale
    made = made if out_global_scale is None else out_global_scale
    given = global_scale is not None and out_global_scale is None
    ops.quantize_nvfp4_out.default(x, global_scale, names, codes, scale, None if given else made)
    return codes, scale, made if global_scale is None else global_scale


def _nvfp4(x: Tensor, global_scale: Tensor | None, backend: Names) -> tuple[Tensor, Tensor, Tensor]:
    from kernelhub.ops.quant.nvfp4 import quantize_nvfp4 as eager

    codes, scale, made = eager(plain(x), _plain(global_scale), backend=backend)
    return codes, scale, made if global_scale is None else x.new_empty(0, dtype=torch.float32)


def _nvfp4_out(
    x: Tensor,
    global_scale: Tensor | None,
    backend: Names,
    out: Tensor,
    out_scale: Tensor,
    out_global_scale: Tensor | None,
) -> None:
    from kernelhub.ops.quant.nvfp4 import quantize_nvfp4 as eager

    eager(plain(x), _plain(global_scale), out, out_scale, out_global_scale, backend=backend)


def _nvfp4_memory(x: Tensor, global_scale: Tensor | None, backend: Names) -> tuple[Tensor, Tensor, Tensor]:
    *lead, width = x.shape
    made = x.new_empty(0 if global_scale is not None else 1, dtype=torch.float32)
    scale = x.new_empty((*lead, width // NVFP4_GROUP), dtype=E4M3)
    return x.new_empty((*lead, width // 2), dtype=torch.uint8), scale, made


_NVFP4 = "Tensor x, Tensor? global_scale, str[]? backend"
define(f"quantize_nvfp4({_NVFP4}) -> (Tensor, Tensor, Tensor)", _nvfp4, _nvfp4_memory)
define(
    f"quantize_nvfp4_out({_NVFP4}, Tensor(a!) out, Tensor(b!) out_scale, Tensor(c!)? out_global_scale) -> ()",
    _nvfp4_out,
)


# quantize_mxfp4, quantize_mxfp8


def quantize_mxfp4(
    x: Tensor,
    scale_rounding: str = "floor",
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    backend: Backend = None,
) -> tuple[Tensor, Tensor]:
    """`kernelhub.quantize_mxfp4` through its operator."""
    return _through_mx(x, True, scale_rounding, out, out_scale, backend)


def quantize_mxfp8(
    x: Tensor,
    scale_rounding: str = "floor",
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    backend: Backend = None,
) -> tuple[Tensor, Tensor]:
    """`kernelhub.quantize_mxfp8` through its operator."""
    return _through_mx(x, False, scale_rounding, out, out_scale, backend)


def _through_mx(
    x: Tensor, fp4: bool, rounding: str, out: Tensor | None, out_scale: Tensor | None, backend: Backend
) -> tuple[Tensor, Tensor]:
    _check_rows("quantize_mxfp4" if fp4 else "quantize_mxfp8", x)
    form, ops = (fp4, rounding, names_of(backend)), torch.ops.kernelhub
    if out is None and out_scale is None:
        made: tuple[Tensor, Tensor] = ops.quantize_mx.default(x, *form)
        return made
    codes, scale = _mx_memory(x, *form)
    codes, scale = codes if out is None else out, scale if out_scale is None else out_scale
    ops.quantize_mx_out.default(x, *form, codes, scale)
    return codes, scale


def _mx(x: Tensor, fp4: bool, rounding: str, backend: Names) -> tuple[Tensor, Tensor]:
    from kernelhub.ops.quant.mxfp4 import quantize_mxfp4
    from kernelhub.ops.quant.mxfp8 import quantize_mxfp8

    return (quantize_mxfp4 if fp4 else quantize_mxfp8)(plain(x), rounding, backend=backend)


def _mx_out(x: Tensor, fp4: bool, rounding: str, backend: Names, out: Tensor, out_scale: Tensor) -> None:
    from kernelhub.ops.quant.mxfp4 import quantize_mxfp4
    from kernelhub.ops.quant.mxfp8 import quantize_mxfp8

    (quantize_mxfp4 if fp4 else quantize_mxfp8)(plain(x), rounding, out, out_scale, backend=backend)


def _mx_memory(x: Tensor, fp4: bool, rounding: str, backend: Names) -> tuple[Tensor, Tensor]:
    *lead, width = x.shape
    codes = x.new_empty((*lead, width // 2), dtype=torch.uint8) if fp4 else x.new_empty(x.shape, dtype=E4M3)
    return codes, x.new_empty((*lead, -(-width // MX_GROUP)), dtype=E8M0)


_MX = "Tensor x, bool fp4, str rounding, str[]? backend"
define(f"quantize_mx({_MX}) -> (Tensor, Tensor)", _mx, _mx_memory)
define(f"quantize_mx_out({_MX}, Tensor(a!) out, Tensor(b!) out_scale) -> ()", _mx_out)


# dequantize_*


def dequantize_fp8(
    x: Tensor,
    scale: Tensor,
    group_size: int = 128,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """`kernelhub.dequantize_fp8` through its operator."""
    return _back("fp8", x, scale, None, group_size, out_dtype, out, backend)


def dequantize_nvfp4(
    x: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """`kernelhub.dequantize_nvfp4` through its operator."""
    return _back("nvfp4", x, scale, global_scale, 0, out_dtype, out, backend)


def dequantize_mxfp4(
    x: Tensor,
    scale: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """`kernelhub.dequantize_mxfp4` through its operator."""
    return _back("mxfp4", x, scale, None, 0, out_dtype, out, backend)


def dequantize_mxfp8(
    x: Tensor,
    scale: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """`kernelhub.dequantize_mxfp8` through its operator."""
    return _back("mxfp8", x, scale, None, 0, out_dtype, out, backend)


def _back(
    name: str,
    x: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    group_size: int,
    out_dtype: torch.dtype,
    out: Tensor | None,
    backend: Backend,
) -> Tensor:
    _check_rows(f"dequantize_{name}", x)
    form, ops = (name, x, scale, global_scale, group_size, out_dtype, names_of(backend)), torch.ops.kernelhub
    if out is None:
        made: Tensor = ops.dequantize.default(*form)
        return made
    ops.dequantize_out.default(*form, out)
    return out


def _dequantize(
    name: str,
    x: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    group_size: int,
    out_dtype: torch.dtype,
    backend: Names,
    out: Tensor | None = None,
) -> Tensor:
    from kernelhub.ops.quant.fp8 import dequantize_fp8
    from kernelhub.ops.quant.mxfp4 import dequantize_mxfp4
    from kernelhub.ops.quant.mxfp8 import dequantize_mxfp8
    from kernelhub.ops.quant.nvfp4 import dequantize_nvfp4

    x, scale = plain(x), plain(scale)
    if name == "fp8":
        return dequantize_fp8(x, scale, group_size, out_dtype, out, backend)
    if name == "nvfp4":
        assert global_scale is not None
        return dequantize_nvfp4(x, scale, plain(global_scale), out_dtype, out, backend)
    return (dequantize_mxfp4 if name == "mxfp4" else dequantize_mxfp8)(x, scale, out_dtype, out, backend)


def _dequantize_out(
    name: str,
    x: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    group_size: int,
    out_dtype: torch.dtype,
    backend: Names,
    out: Tensor,
) -> None:
    _dequantize(name, x, scale, global_scale, group_size, out_dtype, backend, out)


def _dequantize_memory(
    name: str,
    x: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    group_size: int,
    out_dtype: torch.dtype,
    backend: Names,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] * (2 if name.endswith("fp4") else 1)), dtype=out_dtype)


_BACK = "str name, Tensor x, Tensor scale, Tensor? global_scale, int group_size, ScalarType out_dtype, str[]? backend"
define(f"dequantize({_BACK}) -> Tensor", _dequantize, _dequantize_memory)
define(f"dequantize_out({_BACK}, Tensor(a!) out) -> ()", _dequantize_out)
