"""Formats of the operands, told from their dtypes, and what the op asks of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from kernelhub.dispatch.problem import CHECKPOINT
from kernelhub.errors import InvalidArgument
from kernelhub.ops.arguments import check_wants_no_gradient, describe, dtype_name
from kernelhub.ops.formats import E4M3, E8M0
from kernelhub.ops.gemm.fp4.problem import FP8, GROUP, MXFP4, MXFP8, NVFP4, OUT_DTYPES, multiple_of_k
from kernelhub.ops.operands import check_destination, check_operand
from kernelhub.ops.packed import PackedWeight

NAME = "fp4_gemm"
BYTES = (torch.uint8, torch.float4_e2m1fn_x2)
EXPONENTS = (E8M0, torch.uint8)
_OUT = tuple(getattr(torch, name) for name in OUT_DTYPES)


def refuse(parameter: str, problem: str, fix: str) -> NoReturn:
    """Raise the error that names the parameter."""
    raise InvalidArgument(NAME, parameter, problem, fix)


def a_format_of(a: Tensor, a_scale: Tensor | None) -> str:
    """Format of a; empty if there is none such."""
    if a.dtype in (torch.bfloat16, torch.float16):
        return dtype_name(a.dtype) if a_scale is None else ""
    if a_scale is None:
        return ""
    if a.dtype is E4M3:
        return FP8 if a_scale.dtype is torch.float32 else MXFP8 if a_scale.dtype in EXPONENTS else ""
    return fp4_format_of(a_scale) if a.dtype in BYTES else ""


def fp4_format_of(scale: Tensor | None) -> str:
    """Format of float4 with such scales; empty if there is none such."""
    if scale is None:
        return ""
    return NVFP4 if scale.dtype is E4M3 else MXFP4 if scale.dtype in EXPONENTS else ""


def check_tensor(parameter: str, tensor: Any, dtypes: Sequence[torch.dtype], like: Tensor | None) -> None:
    """A tensor of one of these dtypes, where `like` is, that wants no gradient."""
    check_operand(NAME, parameter, tensor)
    if tensor.dtype not in dtypes:
        refuse(parameter, f"has dtype {dtype_name(tensor.dtype)}", f"give {' or '.join(map(dtype_name, dtypes))}")
    if like is not None and tensor.device != like.device:
        refuse(parameter, f"is on {tensor.device}", f"move it to {like.device}, where a is")
    check_wants_no_gradient(NAME, parameter, tensor)


def check_weight(b: Any, b_scale: Any, b_global_scale: Any, like: Tensor | None) -> str:
    """A weight as in a checkpoint; gives its format."""
    check_tensor("b", b, BYTES, like)
    if b.ndim != 2 or 0 in b.shape:
        refuse("b", f"has shape {list(b.shape)}", "give [N, K / 2] with at least one element")
    check_tensor("b_scale", b_scale, (E4M3, *EXPONENTS), b)
    form = fp4_format_of(b_scale)
    _check_columns("b", b.shape[1], GROUP[form] // 2, form)
    _check_scale("b_scale", b_scale, (b.shape[0], b.shape[1] * 2 // GROUP[form]), form)
    _check_global("b_global_scale", b_global_scale, form, b)
    return form


def check_activations(a: Any, a_scale: Any, a_global_scale: Any) -> str:
    """The operand a; gives its format."""
    check_tensor("a", a, (torch.bfloat16, torch.float16, E4M3, *BYTES), None)
    if a.ndim < 1:
        refuse("a", "has no dimension", "give [..., K]")
    if a.dtype in (torch.bfloat16, torch.float16):
        if a_scale is not None:
            refuse("a_scale", f"is given for {dtype_name(a.dtype)}", "only fp8 and float4 have scales")
        form = dtype_name(a.dtype)
    else:
        wanted = (torch.float32, *EXPONENTS) if a.dtype is E4M3 else (E4M3, *EXPONENTS)
        check_tensor("a_scale", a_scale, wanted, a)
        form = a_format_of(a, a_scale)
    lead, width = tuple(a.shape[:-1]), a.shape[-1]
    if form in (NVFP4, MXFP4, MXFP8):
        per_byte = 1 if form == MXFP8 else 2
        _check_columns("a", width, GROUP[form] // per_byte, form)
        _check_scale("a_scale", a_scale, (*lead, width * per_byte // GROUP[form]), form)
    elif form == FP8 and a_scale.numel() != 1 and tuple(a_scale.shape) not in (lead, (*lead, 1)):
        refuse("a_scale", f"is {describe(a_scale)}", f"give float32 of one element or {[*lead, 1]}")
    _check_global("a_global_scale", a_global_scale, form, a)
    return form


def check(
    a: Any,
    b: Any,
    a_scale: Any,
    b_scale: Any,
    a_global_scale: Any,
    b_global_scale: Any,
    bias: Any,
    out_dtype: Any,
    out: Any,
) -> None:
    """Everything that the contract says of a call."""
    a_format = check_activations(a, a_scale, a_global_scale)
    if isinstance(b, PackedWeight):
        _check_packed(b, b_scale, b_global_scale, a)
        (n, half), b_format = b.shape, b.facts["format"]
    else:
        b_format = check_weight(b, b_scale, b_global_scale, a)
        n, half = b.shape
    k = a.shape[-1] * (2 if a_format in (NVFP4, MXFP4) else 1)
    if k != 2 * half:
        refuse("a", f"is {describe(a)}, {k} elements a row", f"b has {2 * half}")
    multiple = multiple_of_k(a_format, b_format)
    if k % multiple:
        refuse("a", f"has K = {k}", f"{a_format} with {b_format} needs a multiple of {multiple}")
    if out_dtype not in _OUT:
        refuse("out_dtype", f"is {out_dtype}", f"give torch.{', torch.'.join(OUT_DTYPES)}")
    if bias is not None:
        check_tensor("bias", bias, tuple({torch.float32: 0, out_dtype: 0}), a)
        if tuple(bias.shape) != (n,):
            refuse("bias", f"is {describe(bias)}", f"give [{n}]")
    if out is not None:
        operands = {"a": a, "a_scale": a_scale, "b_scale": b_scale, "a_global_scale": a_global_scale}
        operands |= {"b_global_scale": b_global_scale, "bias": bias}
        operands |= b.tensors if isinstance(b, PackedWeight) else {"b": b}
        check_destination(NAME, "out", out, (*a.shape[:-1], n), out_dtype, a.device, operands)


def _check_packed(b: PackedWeight, b_scale: Any, b_global_scale: Any, a: Tensor) -> None:
    if b.op != NAME:
        refuse("b", f"is packed for {b.op}", f"pack it with a plan of {NAME}")
    for parameter, given in (("b_scale", b_scale), ("b_global_scale", b_global_scale)):
        if given is not None:
            refuse(parameter, "is given beside a packed weight", "the packed weight holds it")
    if b.device != a.device:
        refuse("b", f"is on {b.device}", f"move it to {a.device}, where a is")
    if b.layout == CHECKPOINT:
        check_weight(b.tensors["codes"], b.tensors["scale"], b.tensors["global_scale"], a)


def _check_columns(parameter: str, width: int, multiple: int, form: str) -> None:
    if width % multiple or width == 0:
        up = max(1, -(-width // multiple)) * multiple
        refuse(parameter, f"has {width} columns", f"a group of {form} is {multiple} of them: the nearest is {up}")


def _check_scale(parameter: str, scale: Tensor, shape: tuple[int, ...], form: str) -> None:
    if tuple(scale.shape) != shape:
        refuse(parameter, f"is {describe(scale)}", f"give {list(shape)}, row by row, not swizzled, for {form}")


def _check_global(parameter: str, scale: Any, form: str, like: Tensor) -> None:
    if form != NVFP4:
        if scale is not None:
            refuse(parameter, f"is given for {form}", "only nvfp4 has one")
        return
    if scale is None:
        refuse(parameter, "is missing", "nvfp4 has one: float32 of one element, which multiplies")
    check_tensor(parameter, scale, (torch.float32,), like)
    if scale.numel() != 1:
        refuse(parameter, f"is {describe(scale)}", "give float32 of one element")
