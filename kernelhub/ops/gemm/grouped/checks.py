"""Checks of the contract of `grouped_gemm`, for calls and for operands of plans."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from kernelhub.errors import InvalidArgument
from kernelhub.ops.arguments import check_wants_no_gradient, describe, dtype_name
from kernelhub.ops.gemm.grouped.problem import (
    BLOCKS,
    FLOATS,
    FP4,
    FP4_ROWS,
    GROUPS,
    PARTNERS,
    GroupedGemmProblem,
)
from kernelhub.ops.gemm.grouped.scales import (
    PACKED,
    columns_of,
    dtypes_of,
    geometry_of_a,
    geometry_of_b,
    per_group,
    remedy,
    shapes_of_a,
    shapes_of_b,
)
from kernelhub.ops.operands import check_destination, check_operand
from kernelhub.ops.values import values_to_check

NAME = "grouped_gemm"
_FLOATS = tuple(getattr(torch, name) for name in FLOATS)
_DTYPES = (*_FLOATS, torch.float8_e4m3fn, *PACKED)


_Maybe = Tensor | None
Operands = tuple[Tensor, Tensor, _Maybe, _Maybe, _Maybe, _Maybe, _Maybe, _Maybe, _Maybe]


def refuse(parameter: str, problem: str, fix: str) -> NoReturn:
    """Raise the error that names the parameter."""
    raise InvalidArgument(NAME, parameter, problem, fix)


def default_out_dtype(a_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the rows; bfloat16 for float8 and fp4."""
    return torch.bfloat16 if a_dtype.itemsize == 1 else a_dtype


def check(operands: Operands, out_dtype: Any, out: Any) -> None:
    """Everything that the contract says of a call."""
    a, b, offsets, group_sizes, a_scale, b_scale, a_global_scale, b_global_scale, bias = operands
    given: dict[str, Any] = {
        "a": a,
        "b": b,
        "offsets": offsets,
        "group_sizes": group_sizes,
        "a_scale": a_scale,
        "b_scale": b_scale,
        "a_global_scale": a_global_scale,
        "b_global_scale": b_global_scale,
        "bias": bias,
    }
    for parameter, tensor in given.items():
        if tensor is None and parameter not in ("a", "b"):
            continue
        check_operand(NAME, parameter, tensor)
        if tensor.device != a.device:
            refuse(parameter, f"is on {tensor.device}", f"move it to {a.device}, where a is")
        check_wants_no_gradient(NAME, parameter, tensor)
    masked = _check_form(a, offsets, group_sizes)
    if b.ndim != 3 or 0 in b.shape:
        refuse("b", f"has shape {list(b.shape)}", "give [G, N, K], none of them 0")
    for parameter, tensor in (("a", a), ("b", b)):
        if tensor.dtype not in _DTYPES:
            refuse(parameter, f"has dtype {dtype_name(tensor.dtype)}", f"give {', '.join(map(dtype_name, _DTYPES))}")
    groups, n, k = b.shape[0], b.shape[1], columns_of(b)
    if columns_of(a) != k:
        halves = f"two fp4 values a byte in {' and '.join(s for s, t in (('a', a), ('b', b)) if t.dtype in PACKED)}"
        fix = f"b has {k}: it is [G, N, K]" + (f", {halves}" if PACKED[0] in (a.dtype, b.dtype) else "")
        refuse("a", f"has {columns_of(a)} columns", fix)
    lengths, parameter = (group_sizes, "group_sizes") if masked else (offsets, "offsets")
    check_lengths(parameter, lengths, groups, a, masked)
    if out_dtype is not None and out_dtype not in _FLOATS:
        refuse("out_dtype", f"is {out_dtype}", f"give {', '.join(FLOATS)}")
    _check_scales(a, b, a_scale, b_scale, (groups, n, k))
    _check_global_scales(a, b, operands)
    if bias is not None and (bias.dtype not in _FLOATS or tuple(bias.shape) != (groups, n)):
        refuse("bias", f"is {describe(bias)}", f"give {', '.join(FLOATS)} {[groups, n]}")
    if out is not None:
        check_operand(NAME, "out", out)
        if out.dtype not in _FLOATS or out_dtype not in (None, out.dtype):
            allowed = dtype_name(out_dtype) if out_dtype else ", ".join(FLOATS)
            refuse("out", f"has dtype {dtype_name(out.dtype)}", f"give {allowed}")
        check_destination(NAME, "out", out, (*a.shape[:-1], n), out.dtype, a.device, given)


def _check_form(a: Tensor, offsets: Tensor | None, group_sizes: Tensor | None) -> bool:
    """Whether rows are masked."""
    if (offsets is None) == (group_sizes is None):
        how = "are both given" if offsets is not None else "are both missing"
        refuse("offsets", f"and group_sizes {how}", "give offsets with a [M, K], or group_sizes with a [G, M_max, K]")
    masked = group_sizes is not None
    if a.ndim != (3 if masked else 2):
        form = "[G, M_max, K] with group_sizes" if masked else "[M, K] with offsets"
        refuse("a", f"has shape {list(a.shape)}", f"give {form}")
    return masked


def check_lengths(parameter: str, lengths: Tensor | None, groups: int, a: Tensor, masked: bool) -> None:
    assert lengths is not None
    if lengths.dtype is not torch.int32 or tuple(lengths.shape) != (groups,):
        refuse(parameter, f"is {describe(lengths)}", f"give int32 {[groups]}, one for each group of b")
    if masked and a.shape[0] != groups:
        refuse("a", f"has {a.shape[0]} groups", f"b has {groups}")
    values = values_to_check(lengths)
    if values is not None:
        _check_values(parameter, values, a.shape[1] if masked else a.shape[0], masked)


def _check_values(parameter: str, lengths: Tensor, room: int, masked: bool) -> None:
    values = lengths.tolist()
    below = 0
    for index, value in enumerate(values):
        if not below <= value <= room:
            refuse(parameter, f"is {value} at {index}", f"it must be between {below} and {room}")
        if not masked:
            below = value


def _check_scales(
    a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, sizes: tuple[int, int, int]
) -> None:
    groups, n, k = sizes
    form_a, form_b = _form(a), _form(b)
    if form_a != form_b and form_b != FP4:
        refuse("a", f"has dtype {form_a}", f"b has {form_b}; they must be equal except for fp4")
    if form_b == FP4 and a.dtype is torch.float32:
        refuse("a", f"has dtype {form_a}", FP4_ROWS)
    for parameter, scale, wanted in (
        ("a_scale", a_scale, a.element_size() == 1),
        ("b_scale", b_scale, b.element_size() == 1),
    ):
        if (scale is not None) != wanted:
            refuse(parameter, "is missing" if wanted else "is given", f"a is {form_a}, b {form_b}")
    b_kind = geometry_of_b(b_scale, b)
    a_kind = geometry_of_a(a_scale, b_kind, a)
    for parameter, scale, kind in (("b_scale", b_scale, b_kind), ("a_scale", a_scale, a_kind)):
        if scale is None or kind is None:
            continue
        of_a = parameter == "a_scale"
        shapes = shapes_of_a(kind, tuple(a.shape[:-1]), k) if of_a else shapes_of_b(kind, groups, n, k)
        if tuple(scale.shape) not in shapes or scale.dtype not in dtypes_of(kind):
            dtypes = " or ".join(map(dtype_name, dtypes_of(kind)))
            other = None
            if kind in (*GROUPS, *BLOCKS) or scale.dtype is torch.int32:
                of_blocks = shapes_of_a(GROUPS[0], tuple(a.shape[:-1]), k) if of_a else shapes_of_b(BLOCKS[0], *sizes)
                other = remedy(parameter, scale, of_blocks[0])
            refuse(parameter, f"is {describe(scale)}", other or f"{kind} scales are {dtypes} {list(shapes[0])}")
    if a_kind in PARTNERS and b_kind not in PARTNERS[a_kind]:
        refuse("a", f"is in {a_kind}, b in {b_kind}", f"{a_kind} rows take {' or '.join(PARTNERS[a_kind])} weights")


def _form(operand: Tensor) -> str:
    return FP4 if operand.dtype in PACKED else dtype_name(operand.dtype)


def _check_global_scales(a: Tensor, b: Tensor, operands: Operands) -> None:
    _, _, _, _, a_scale, b_scale, a_global_scale, b_global_scale, _ = operands
    for parameter, given, scale, kind, of in (
        ("a_global_scale", a_global_scale, a_scale, geometry_of_a(a_scale, geometry_of_b(b_scale, b), a), "rows"),
        ("b_global_scale", b_global_scale, b_scale, geometry_of_b(b_scale, b), "weights"),
    ):
        if given is None:
            continue
        if scale is None or kind != "nvfp4":
            refuse(parameter, "is given", f"it belongs to NVFP4 {of}, whose {parameter[0]}_scale is float8_e4m3fn")
        shapes = per_group(b.shape[0])
        if given.dtype is not torch.float32 or tuple(given.shape) not in shapes:
            refuse(parameter, f"is {describe(given)}", f"give float32 {list(shapes[0])}")


def check_form(operands: Operands, out: Tensor | None, problem: GroupedGemmProblem) -> None:
    """Operands are those that the kernel was made for: a plan may be run with others than it was prepared for."""
    a, b, offsets, _, a_scale, b_scale, a_global_scale, b_global_scale, bias = operands
    b_kind = geometry_of_b(b_scale, b)
    a_kind = geometry_of_a(a_scale, b_kind, a)
    if a_kind == "tensor" and problem.a_scale == "token" and a.ndim == 2 and a.shape[0] == 1:
        a_kind = "token"  # one row: the shape says either, and they mean the same
    form = (_form(a), _form(b), *b.shape[:2], columns_of(a))
    wanted = (problem.a_dtype, problem.b_dtype, problem.num_groups, problem.n, problem.k)
    if form != wanted:
        shape = [problem.num_groups, problem.n, problem.k]
        refuse("b", f"is {describe(b)}", f"the plan is for {problem.a_dtype} rows and {problem.b_dtype} {shape}")
    if (offsets is None) != problem.masked:
        refuse("offsets", f"is {'missing' if offsets is None else 'given'}", "the plan is for the other form of rows")
    for parameter, got, want in (("a_scale", a_kind, problem.a_scale), ("b_scale", b_kind, problem.b_scale)):
        if got != want:
            refuse(parameter, f"has geometry {got}", f"the plan is for {want}")
    for parameter, tensor, has in (
        ("a_global_scale", a_global_scale, problem.a_global_scale),
        ("b_global_scale", b_global_scale, problem.global_scale),
        ("bias", bias, problem.bias),
    ):
        if (tensor is not None) != has:
            refuse(parameter, f"is {'given' if not has else 'missing'}", "the plan was prepared with other arguments")
    if out is not None and dtype_name(out.dtype) != problem.out_dtype:
        refuse("out", f"has dtype {dtype_name(out.dtype)}", f"the plan is for {problem.out_dtype}")
