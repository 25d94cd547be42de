"""The arguments of a call of `fused_moe`, and the checks of its contract."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from kernelhub.errors import InvalidArgument
from kernelhub.ops.arguments import check_wants_no_gradient, describe, dtype_name
from kernelhub.ops.formats import E4M3
from kernelhub.ops.moe.experts.problem import (
    ACTIVATIONS,
    ASKED_FORMATS,
    BLOCK_FORMATS,
    FLOATS,
    FOUR_BIT_FORMATS,
    FP8_FORMATS,
    MXFP4,
    NVFP4,
    PLAIN,
)
from kernelhub.ops.moe.experts.weights import (
    BLOCK,
    GROUP,
    PACKED,
    form_of_scale,
    format_of,
    scale_dtypes,
    scale_shapes,
)
from kernelhub.ops.operands import check_destination, check_flag, check_number, check_operand
from kernelhub.ops.packed import PackedWeight

NAME = "fused_moe"
_FLOATS = tuple(getattr(torch, name) for name in FLOATS)


class Operands(NamedTuple):
    """The tensors and numbers of one call of `fused_moe`."""

    x: Tensor
    w13: Tensor | PackedWeight
    w2: Tensor | PackedWeight
    topk_weights: Tensor
    topk_ids: Tensor
    w13_scale: Tensor | None
    w2_scale: Tensor | None
    w13_global_scale: Tensor | None
    w2_global_scale: Tensor | None
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    a1_scale: Tensor | None
    a2_scale: Tensor | None
    alpha: float
    limit: float
    expert_map: Tensor | None
    residual: Tensor | None
    out: Tensor | None


# Of a layer, those that a plan takes together, and that packed weights hold.
WEIGHTS = tuple(side + part for part in ("", "_scale", "_global_scale", "_bias") for side in ("w13", "w2"))
_TENSORS = tuple(name for name in Operands._fields if name not in ("alpha", "limit"))
_NEEDED = ("x", "w13", "w2", "topk_weights", "topk_ids")
# What `moe_dispatch` leaves out in its formats per expert.
_ROUTING = {"topk_weights": "float32 [T, top_k]", "topk_ids": "int32 [T, top_k]"}
_MOST_OF_AN_EXPERT = 2**31 - 1  # elements that kernels find by 32-bit numbers


def refuse(parameter: str, problem: str, fix: str) -> NoReturn:
    """Raise the error that names the parameter."""
    raise InvalidArgument(NAME, parameter, problem, fix)


def check(given: Operands, activation: Any, activation_dtype: Any, on_input: Any = False) -> None:
    """Everything that the contract says of a call, but for the values of ids."""
    _check_packed(given)
    for parameter in _TENSORS:
        tensor = getattr(given, parameter)
        if tensor is None and parameter in _ROUTING:
            fix = f"give {_ROUTING[parameter]}; grouped_gemm takes rows that are sorted by expert"
            refuse(parameter, "is None", fix)
        if (tensor is not None or parameter in _NEEDED) and not isinstance(tensor, PackedWeight):
            check_operand(NAME, parameter, tensor)
    weights = _check_shapes(given)
    if activation not in ACTIVATIONS:
        refuse("activation", f"is {activation!r}", f"give one of {', '.join(ACTIVATIONS)}")
    for parameter, number in (("alpha", given.alpha), ("limit", given.limit)):
        check_number(NAME, parameter, number, "give a finite float")
    if given.limit < 0:
        refuse("limit", f"is {given.limit!r}", "give a magnitude: 0 or more")
    check_flag(NAME, "apply_router_weight_on_input", on_input)
    _check_activations(given, weights, activation_dtype)
    for side in ("w13", "w2"):
        if not isinstance(getattr(given, side), PackedWeight):
            _check_side(given, side, weights)
    _check_places(given)


def _check_packed(given: Operands) -> None:
    """Check that packed weights belong to one layer; a plan has checked those that it packed."""
    sides = {"w13": given.w13, "w2": given.w2}
    if not any(isinstance(weight, PackedWeight) for weight in sides.values()):
        return
    for side, weight in sides.items():
        if not isinstance(weight, PackedWeight):
            refuse(side, "is not packed", "give both as a plan's pack() gave them, or neither")
        if weight.op != NAME or weight.facts["side"] != side:
            what = weight.facts["side"] if weight.op == NAME else weight.op
            refuse(side, f"is packed for {what}", f"pack it with a plan of {NAME}, as {side}")
        for suffix in ("_scale", "_global_scale", "_bias"):
            if getattr(given, side + suffix) is not None:
                refuse(side + suffix, "is given beside a packed weight", "the packed weight holds it")
    assert isinstance(given.w13, PackedWeight)
    assert isinstance(given.w2, PackedWeight)
    for word in ("layout", "facts"):
        mine, its = getattr(given.w2, word), getattr(given.w13, word)
        mine, its = (mine["format"], its["format"]) if word == "facts" else (mine, its)
        if mine != its:
            refuse("w2", f"is {mine}", f"w13 is {its}: pack them together")


def _check_shapes(given: Operands) -> str:
    """Check the shapes of tokens, routing and weights; return the format of the weights."""
    x, w13, w2 = given.x, given.w13, given.w2
    if x.ndim != 2 or x.shape[1] == 0:
        refuse("x", f"has shape {list(x.shape)}", "give [T, H]")
    if x.dtype not in _FLOATS:
        refuse("x", f"has dtype {dtype_name(x.dtype)}", f"give {', '.join(FLOATS)}")
    tokens, hidden = x.shape
    ids = given.topk_ids
    if ids.ndim != 2 or ids.shape[0] != tokens or ids.shape[1] == 0 or ids.dtype is not torch.int32:
        refuse("topk_ids", f"is {describe(ids)}", f"give int32 [{tokens}, top_k]")
    if given.topk_weights.shape != ids.shape or given.topk_weights.dtype is not torch.float32:
        refuse("topk_weights", f"is {describe(given.topk_weights)}", f"give float32 {list(ids.shape)}")
    for parameter, weight in (("w13", w13), ("w2", w2)):
        if len(weight.shape) != 3 or 0 in weight.shape:
            shape = "[E, 2I, H]" if parameter == "w13" else "[E, H, I]"
            refuse(
                parameter,
                f"has shape {list(weight.shape)}",
                f"give {shape}, the last half as wide for codes of four bits",
            )
    if w13.dtype is torch.int32:
        refuse(
            "w13", "has dtype int32", "give uint8: weight_packed of compressed-tensors is w.view(torch.uint8) ^ 0x88"
        )
    if w13.dtype is not x.dtype and w13.dtype is not E4M3 and w13.dtype not in PACKED:
        refuse(
            "w13",
            f"has dtype {dtype_name(w13.dtype)}",
            f"give {dtype_name(x.dtype)}, as x, or fp8, or uint8 with two codes of four bits a byte",
        )
    if w2.dtype is not w13.dtype:
        refuse("w2", f"has dtype {dtype_name(w2.dtype)}", f"w13 has {dtype_name(w13.dtype)}")
    experts, rows = w13.shape[:2]
    a_byte = 2 if w13.dtype in PACKED else 1
    if w13.shape[2] * a_byte != hidden:
        refuse("w13", f"has shape {list(w13.shape)}", f"give [E, 2I, {hidden // a_byte}] for an x {hidden} wide")
    if rows % 2:
        refuse("w13", f"has {rows} rows", f"give an even number, gate and up: {rows + 1}")
    inner = rows // 2
    if list(w2.shape) != [experts, hidden, inner // a_byte] or inner % a_byte:
        refuse("w2", f"has shape {list(w2.shape)}", f"give {[experts, hidden, -(-inner // a_byte)]}, as w13 demands")
    form = form_of_scale(w13, given.w13_scale)
    weights = format_of(w13.dtype, rows, *((None, ()) if form is None else (form[0], tuple(form[1][1:]))))
    if weights in FOUR_BIT_FORMATS:
        for parameter, width in (("w13", hidden), ("w2", inner)):
            group = GROUP[weights]
            if width % group:
                refuse(parameter, f"is {width} wide", f"pad it to {-(-width // group) * group}, a multiple of {group}")
    if weights in BLOCK_FORMATS and inner % BLOCK:
        legal = -(-inner // BLOCK) * BLOCK
        refuse("w13", f"has experts {inner} wide", f"pad them to {legal}: a block may not hold both gate and up")
    return weights


def _check_activations(given: Operands, weights: str, activation_dtype: Any) -> None:
    named = tuple(form for form, fitting in ASKED_FORMATS.items() if weights in fitting)
    allowed = (None, given.x.dtype, *((E4M3,) if weights in FP8_FORMATS else ()), *named)
    if activation_dtype not in allowed:
        names = ", ".join(dtype_name(item) if isinstance(item, torch.dtype) else repr(item) for item in allowed)
        refuse("activation_dtype", f"is {activation_dtype!r} for weights {weights}", f"give {names}")
    quantized = weights in FP8_FORMATS and activation_dtype in (None, E4M3)
    if (given.a1_scale is None) is not (given.a2_scale is None):
        lacking = "a1_scale" if given.a1_scale is None else "a2_scale"
        refuse(lacking, "is None", "give both scales of activations, or neither")
    second = activation_dtype == NVFP4
    if second and given.a1_scale is None:
        refuse(
            "a1_scale", "is None", "give a1_scale and a2_scale for nvfp4: the largest magnitudes, over 6 and over 448"
        )
    for parameter in ("a1_scale", "a2_scale"):
        scale = getattr(given, parameter)
        if scale is None:
            continue
        if not second and (not quantized or weights in BLOCK_FORMATS):
            fix = "only fp8_tensor and fp8_channel have static scales, and only activations in nvfp4 second scales"
            refuse(parameter, f"is given for weights {weights}", fix)
        if scale.numel() != 1 or scale.dtype is not torch.float32:
            refuse(parameter, f"is {describe(scale)}", "give float32 of one element")


def _check_side(given: Operands, side: str, weights: str) -> None:
    """Scales, global scale and bias of one projection."""
    weight, scale = getattr(given, side), getattr(given, side + "_scale")
    experts, rows = weight.shape[:2]
    columns = weight.shape[2] * (2 if weights in FOUR_BIT_FORMATS else 1)
    shapes, dtypes = scale_shapes(weights, experts, rows, columns), scale_dtypes(weights)
    if weights == PLAIN:
        if scale is not None:
            refuse(side + "_scale", "is given", f"{dtype_name(weight.dtype)} weights have no scale")
    else:
        wanted = " or ".join(f"{dtype_name(dtypes[0])} {shape}" for shape in shapes)
        if weights == MXFP4:
            wanted += f" (for 4-bit integers bfloat16 {shapes[0]})"
        if scale is None:
            refuse(side + "_scale", "is None", f"give {wanted}")
        if list(scale.shape) not in shapes or scale.dtype not in dtypes:
            refuse(side + "_scale", f"is {describe(scale)}", f"give {wanted} for weights {weights}")
        if len(scale.shape) == 3 and not _dense_rows(scale):
            refuse(side + "_scale", f"has strides {scale.stride()}", "make it contiguous")
    if not _dense_rows(weight):
        refuse(side, f"has strides {weight.stride()}", "make it contiguous along its last dimension")
    if weight.stride(1) * rows > _MOST_OF_AN_EXPERT and not weight.is_contiguous():
        refuse(side, f"has strides {weight.stride()}", "make it contiguous: an expert has 2^31 elements at most")
    factor = getattr(given, side + "_global_scale")
    if (factor is not None) is not (weights == NVFP4):
        if factor is None:
            refuse(side + "_global_scale", "is None", f"give float32 [{experts}] for weights nvfp4")
        refuse(side + "_global_scale", "is given", f"weights {weights} have none")
    if factor is not None and (
        list(factor.shape) not in ([experts], [experts, 1]) or factor.dtype is not torch.float32
    ):
        refuse(side + "_global_scale", f"is {describe(factor)}", f"give float32 [{experts}]")
    bias = getattr(given, side + "_bias")
    if bias is not None and (list(bias.shape) != [experts, rows] or bias.dtype not in (given.x.dtype, torch.float32)):
        refuse(side + "_bias", f"is {describe(bias)}", f"give {dtype_name(given.x.dtype)} {[experts, rows]}")


def _check_places(given: Operands) -> None:
    """Check the map, the addend and the destination, and the devices of all tensors."""
    x, table = given.x, given.expert_map
    if table is not None and (table.ndim != 1 or table.dtype is not torch.int32 or not table.numel()):
        refuse("expert_map", f"is {describe(table)}", "give int32 [E_global], -1 for experts that are elsewhere")
    added = given.residual
    if added is not None and (added.shape != x.shape or added.dtype is not x.dtype):
        refuse("residual", f"is {describe(added)}", f"give {describe(x)}")
    for parameter in _TENSORS:
        tensor = getattr(given, parameter)
        if tensor is None:
            continue
        if tensor.device != x.device:
            refuse(parameter, f"is on {tensor.device}", f"move it to {x.device}, where x is")
        if isinstance(tensor, PackedWeight):
            continue
        check_wants_no_gradient(NAME, parameter, tensor)
    if given.out is not None:
        check_destination(NAME, "out", given.out, x.shape, x.dtype, x.device, _apart_from_out(given))


def _apart_from_out(given: Operands) -> dict[str, Any]:
    """The tensors that the destination must not overlap; it may replace x and residual, which are read first."""
    operands: dict[str, Any] = {}
    for parameter, value in zip(Operands._fields, given, strict=True):
        if isinstance(value, PackedWeight):
            operands |= {f"{parameter} ({name})": tensor for name, tensor in value.tensors.items()}
        elif parameter not in ("x", "residual", "out") or (parameter != "out" and not _is_same(value, given.out)):
            operands[parameter] = value
    return operands


def _is_same(tensor: Any, out: Any) -> bool:
    """The destination is just this operand."""
    return tensor is out or (
        isinstance(tensor, Tensor)
        and isinstance(out, Tensor)
        and tensor.data_ptr() == out.data_ptr()
        and (tensor.dtype, tensor.shape) == (out.dtype, out.shape)
        and tensor.stride() == out.stride()
    )


def _dense_rows(tensor: Tensor) -> bool:
    return tensor.stride(-1) == 1 or tensor.shape[-1] == 1
