"""Checks of the contract of `fp8_gemm`, for calls and for operands of plans."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from kernelhub.errors import InvalidArgument
from kernelhub.ops.arguments import check_wants_no_gradient, describe, dtype_name
from kernelhub.ops.formats import E4M3, E5M2
from kernelhub.ops.gemm.fp8.problem import E8M0, FLOAT, FLOATS, HALVES, Fp8GemmProblem
from kernelhub.ops.gemm.fp8.scaling import blocks, fits_b, remedy, scaling_of_form
from kernelhub.ops.operands import check_destination, check_operand
from kernelhub.ops.packed import PackedWeight, layout_of

NAME = "fp8_gemm"
_FLOATS = tuple(getattr(torch, name) for name in FLOATS)
_HALVES = tuple(getattr(torch, name) for name in HALVES)


def refuse(parameter: str, problem: str, fix: str) -> NoReturn:
    """Raise the error that names the parameter."""
    raise InvalidArgument(NAME, parameter, problem, fix)


def check(a: Any, b: Any, a_scale: Any, b_scale: Any, bias: Any, out_dtype: Any, out: Any) -> None:
    """Everything that the contract says of a call."""
    packed = isinstance(b, PackedWeight)
    operands = {"a": a} if packed else {"a": a, "b": b, "b_scale": b_scale}
    more = (("a_scale", a_scale), ("bias", bias))
    operands |= {name: value for name, value in more if value is not None}
    for parameter, tensor in operands.items():
        check_operand(NAME, parameter, tensor)
    if out_dtype not in _FLOATS:
        refuse("out_dtype", f"is {out_dtype}", f"give torch.{', torch.'.join(FLOATS)}")
    if packed:
        _check_packed(b, b_scale, a)
    for parameter, tensor, shape in (("a", a, "[M, K]"), *(() if packed else (("b", b, "[N, K]"),))):
        if tensor.ndim != 2:
            refuse(parameter, f"has shape {list(tensor.shape)}", f"give {shape}")
        if tensor.dtype is not E4M3 and (parameter == "b" or tensor.dtype not in (E5M2, *_HALVES)):
            more_dtypes = f", float8_e5m2, {', '.join(HALVES)}" if parameter == "a" else ""
            refuse(parameter, f"has dtype {dtype_name(tensor.dtype)}", f"give float8_e4m3fn{more_dtypes}")
    if (a_scale is None) != (a.dtype in _HALVES):
        what, fix = ("is missing", "float8 has scales") if a_scale is None else ("is given", "leave it out")
        refuse("a_scale", what, f"a is {dtype_name(a.dtype)}: {fix}")
    n, k = b.shape
    if 0 in (n, k):
        refuse("b", f"has shape {list(b.shape)}", "give at least one row and one column")
    if a.shape[1] != k:
        refuse("a", f"has {a.shape[1]} columns", f"b has {k}: give [M, {k}]")
    if not packed:
        _check_scales(a, a_scale, b_scale, n, k)
    if bias is not None and (bias.shape != (n,) or bias.dtype is not out_dtype):
        refuse("bias", f"is {describe(bias)}", f"give {dtype_name(out_dtype)} [{n}]")
    for parameter, tensor in operands.items():
        if tensor.device != a.device:
            refuse(parameter, f"is on {tensor.device}", f"move it to {a.device}, where a is")
        check_wants_no_gradient(NAME, parameter, tensor)
    if out is not None:
        if packed:
            operands |= b.tensors
        check_destination(NAME, "out", out, (a.shape[0], n), out_dtype, a.device, operands)


def form_of_a(scale: Tensor | None) -> tuple[torch.dtype | None, int, int]:
    """What a key holds of a_scale: nothing that depends on the number of rows, but whether there is one scale."""
    if scale is None:
        return None, 0, 0
    rank = scale.ndim
    return scale.dtype, rank, 1 if rank == 0 else scale.shape[1] if rank == 2 else int(scale.shape[0] == 1)


def _check_packed(b: PackedWeight, b_scale: Any, a: Tensor) -> None:
    if b.op != NAME:
        refuse("b", f"is packed for {b.op}", f"pack it with a plan of {NAME}")
    if b_scale is not None:
        refuse("b_scale", "is given beside a packed weight", "the packed weight holds it")
    if a.dtype not in _HALVES:
        refuse("b", "is packed", f"a is {dtype_name(a.dtype)}; packed weights go with {' or '.join(HALVES)}")
    if b.device != a.device:
        refuse("b", f"is on {b.device}", f"move it to {a.device}, where a is")


def _check_scales(a: Tensor, a_scale: Tensor | None, b_scale: Tensor, n: int, k: int) -> None:
    tokens = a.shape[0]
    if a_scale is None:
        if scaling_of_form(None, 0, 0, b_scale.dtype, b_scale.shape, n, k) is None:
            of_blocks = f"[{blocks(n, 128)}, {blocks(k, 128)}] or [{n}, {blocks(k, 128)}] in float32 or float8_e8m0fnu"
            legal = f"for b [{n}, {k}] beside {dtype_name(a.dtype)} give float32 [] or [{n}], or {of_blocks}"
            refuse("b_scale", f"is {describe(b_scale)}", remedy("b_scale", b_scale, n, k) or legal)
        return
    if scaling_of_form(*form_of_a(a_scale), b_scale.dtype, b_scale.shape, n, k) is None:
        parameter, told = ("a_scale", a_scale) if fits_b(b_scale.dtype, b_scale.shape, n, k) else ("b_scale", b_scale)
        fix = remedy(parameter, told, tokens if told is a_scale else n, k)
        refuse(
            parameter,
            f"is {describe(told)}" + (f" beside a b_scale of {describe(b_scale)}" if told is a_scale else ""),
            fix
            or f"for a [{tokens}, {k}] and b [{n}, {k}] give float32 [], [{tokens}] by float32 [], [{n}], or "
            f"[{tokens}, {blocks(k, 128)}] by [{blocks(n, 128)}, {blocks(k, 128)}] or [{n}, {blocks(k, 128)}] in "
            f"float32 or float8_e8m0fnu, or float8_e8m0fnu [{tokens}, {blocks(k, 32)}] by [{n}, {blocks(k, 32)}]",
        )
    if (a_scale.ndim == 2 or (a_scale.ndim == 1 and a_scale.shape[0] != 1)) and a_scale.shape[0] != tokens:
        wanted = [tokens, *a_scale.shape[1:]]
        refuse("a_scale", f"is {describe(a_scale)}", f"a has {tokens} rows: give {wanted}")


def check_form(
    b: Tensor | PackedWeight,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    problem: Fp8GemmProblem,
) -> None:
    """Operands are those that the kernel was made for: a plan may be run with others than it was prepared for."""
    if layout_of(b) != problem.weight_layout:
        fix = f"the plan is for {problem.weight_layout}; give what its pack() gives, or prepare one with this weight"
        refuse("b", f"is laid out as {layout_of(b)}", fix)
    if isinstance(b, PackedWeight):
        b_dtype, b_shape = b.facts["scale"]
    else:
        assert b_scale is not None
        b_dtype, b_shape = b_scale.dtype, b_scale.shape
    of_a_scale = form_of_a(a_scale)
    n, k = b.shape
    scaling = scaling_of_form(*of_a_scale, b_dtype, b_shape, n, k)
    dtypes = tuple(FLOAT if dtype in (None, torch.float32) else E8M0 for dtype in (of_a_scale[0], b_dtype))
    form = (scaling, *b.shape, bias is not None, *dtypes, a_scale is None)
    wanted = (
        problem.scaling,
        problem.n,
        problem.k,
        problem.bias,
        problem.a_scale_dtype,
        problem.b_scale_dtype,
        problem.weight_only is not None,
    )
    if form != wanted:
        dtypes_wanted = (problem.a_scale_dtype, problem.b_scale_dtype)
        text = f"a b of {[problem.n, problem.k]}, scaling {problem.scaling} ({', '.join(dtypes_wanted)})"
        of_a = "no scales of a" if a_scale is None else f"scales {describe(a_scale)}"
        told = f"is {[n, k]} with {of_a} and {dtype_name(b_dtype)} {list(b_shape)}"
        refuse("b", told, f"the plan is for {text}, {'with' if problem.bias else 'without'} bias")


def facts_of_weight(b: Tensor, b_scale: Tensor, problem: Fp8GemmProblem) -> dict[str, Any]:
    """The facts of a packed weight that its problem needs: dtype and shape of its scales."""
    n, k = b.shape
    scaling = scaling_of_form(None, 0, 0, b_scale.dtype, b_scale.shape, n, k)
    dtype = FLOAT if b_scale.dtype is torch.float32 else E8M0
    if (scaling, n, k, dtype) != (problem.scaling, problem.n, problem.k, problem.b_scale_dtype):
        of_plan = f"{[problem.n, problem.k]}, scaling {problem.scaling} in {problem.b_scale_dtype}"
        refuse("b", f"is {describe(b)} with scale {describe(b_scale)}", f"the plan is for {of_plan}")
    return {"scale": (b_scale.dtype, tuple(b_scale.shape))}
