"""How a call of `fused_moe` becomes a launch: its problem, its checks, its run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, is_grad_enabled

from kernelhub.errors import InvalidArgument
from kernelhub.ops.arguments import Forms, alike, describe, dtype_name, usable
from kernelhub.ops.formats import E4M3
from kernelhub.ops.moe.experts.adapter import Values
from kernelhub.ops.moe.experts.problem import (
    ACTIVATIONS,
    BLOCK_FORMATS,
    FLOATS,
    FP4_FORMATS,
    FP8_BLOCK,
    FP8_FORMATS,
    NVFP4,
    PLAIN,
    ExpertsProblem,
)
from kernelhub.ops.moe.experts.weights import (
    BLOCK,
    FP4_GROUP,
    PACKED,
    Matrix,
    format_of,
    matrix,
    scale_dtypes,
    scale_shapes,
)
from kernelhub.probes.device import facts

NAME = "fused_moe"
_FLOATS = tuple(getattr(torch, name) for name in FLOATS)


class Operands(NamedTuple):
    """The tensors and numbers of one call, as `fused_moe` is given them."""

    x: Tensor
    w13: Tensor
    w2: Tensor
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


_TENSORS = tuple(name for name in Operands._fields if name not in ("alpha", "limit"))
_FIRST_OF_LAYER, _LAST_OF_LAYER = Operands._fields.index("w13_scale"), Operands._fields.index("a2_scale") + 1
_NEEDED = ("x", "w13", "w2", "topk_weights", "topk_ids")


def refuse(parameter: str, problem: str, fix: str) -> NoReturn:
    """Raise the error that names the parameter."""
    raise InvalidArgument(NAME, parameter, problem, fix)


def key_of(given: Operands, activation: str, activation_dtype: torch.dtype | None, on_input: bool) -> tuple[Any, ...]:
    """The facets of a call."""
    scale, shape = given.w13_scale, given.w13.shape
    return (
        given.x.dtype,
        given.x.shape[1],
        shape[0],
        shape[1],
        given.topk_ids.shape[1],
        given.w13.dtype,
        None if scale is None else (scale.dtype, scale.shape),
        activation,
        activation_dtype,
        given.w13_bias is not None,
        given.w2_bias is not None,
        given.a1_scale is not None,
        on_input,
        given.expert_map is not None,
        given.residual is not None,
    )


def problem_of(key: Any, device: int) -> ExpertsProblem:
    """The problem that a key means on a device."""
    dtype, hidden, experts, rows, top_k, weight_dtype, scale, activation, activation_dtype, *features = key
    scale_dtype, scale_shape = (None, ()) if scale is None else (scale[0], tuple(scale[1][1:]))
    weights = format_of(weight_dtype, rows, scale_dtype, scale_shape)
    if activation_dtype is None:
        activation_dtype = E4M3 if weights in FP8_FORMATS else dtype
    w13_bias, w2_bias, static, on_input, mapped, residual = features
    return ExpertsProblem(
        device=facts(torch.device("cpu") if device < 0 else torch.device("cuda", device)),
        dtype=dtype_name(dtype),
        weights=weights,
        activation_dtype=dtype_name(activation_dtype),
        num_experts=experts,
        top_k=top_k,
        hidden_size=hidden,
        intermediate_size=rows // 2,
        activation=activation,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        static_scales=static,
        apply_router_weight_on_input=on_input,
        expert_map=mapped,
        residual=residual,
    )


def check(given: Operands, activation: Any, activation_dtype: Any) -> None:
    """Everything that the contract says of a call, but for the values of ids."""
    for parameter in _TENSORS:
        tensor = getattr(given, parameter)
        if not isinstance(tensor, Tensor) and (tensor is not None or parameter in _NEEDED):
            refuse(parameter, f"is {type(tensor).__name__}", "give a torch.Tensor")
    weights = _check_shapes(given)
    if activation not in ACTIVATIONS:
        refuse("activation", f"is {activation!r}", f"give one of {', '.join(ACTIVATIONS)}")
    for parameter, number in (("alpha", given.alpha), ("limit", given.limit)):
        if isinstance(number, bool) or not isinstance(number, float | int) or not math.isfinite(number):
            refuse(parameter, f"is {number!r}", "give a finite float")
    _check_activations(given, weights, activation_dtype)
    for side in ("w13", "w2"):
        _check_side(given, side, weights)
    _check_places(given)


def _check_shapes(given: Operands) -> str:
    """Of tokens, routing and weights; gives the format of the weights."""
    x, w13, w2 = given.x, given.w13, given.w2
    if x.ndim != 2 or x.shape[1] == 0:
        refuse("x", f"has shape {list(x.shape)}", "give [T, H]")
    if x.dtype not in _FLOATS:
        refuse("x", f"has dtype {dtype_name(x.dtype)}", f"give {', '.join(FLOATS)}")
    if x.is_meta:
        refuse("x", "is on meta", "give a tensor with memory, or a fake one under torch.compile")
    tokens, hidden = x.shape
    ids = given.topk_ids
    if ids.ndim != 2 or ids.shape[0] != tokens or ids.shape[1] == 0 or ids.dtype is not torch.int32:
        refuse("topk_ids", f"is {describe(ids)}", f"give int32 [{tokens}, top_k]")
    if given.topk_weights.shape != ids.shape or given.topk_weights.dtype is not torch.float32:
        refuse("topk_weights", f"is {describe(given.topk_weights)}", f"give float32 {list(ids.shape)}")
    for parameter, weight in (("w13", w13), ("w2", w2)):
        if weight.ndim != 3 or 0 in weight.shape:
            shape = "[E, 2I, H]" if parameter == "w13" else "[E, H, I]"
            refuse(parameter, f"has shape {list(weight.shape)}", f"give {shape}, the last half as wide for fp4")
    if w13.dtype is not x.dtype and w13.dtype is not E4M3 and w13.dtype not in PACKED:
        refuse("w13", f"has dtype {dtype_name(w13.dtype)}", f"give {dtype_name(x.dtype)}, as x, or fp8 or fp4")
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
    scale = given.w13_scale
    weights = format_of(w13.dtype, rows, *((None, ()) if scale is None else (scale.dtype, tuple(scale.shape[1:]))))
    if weights in FP4_FORMATS:
        for parameter, width in (("w13", hidden), ("w2", inner)):
            group = FP4_GROUP[weights]
            if width % group:
                refuse(parameter, f"is {width} wide", f"pad it to {-(-width // group) * group}, a multiple of {group}")
    if weights in BLOCK_FORMATS and inner % BLOCK:
        legal = -(-inner // BLOCK) * BLOCK
        refuse("w13", f"has experts {inner} wide", f"pad them to {legal}: a block may not hold both gate and up")
    return weights


def _check_activations(given: Operands, weights: str, activation_dtype: Any) -> None:
    allowed = (None, given.x.dtype, *((E4M3,) if weights in FP8_FORMATS else ()))
    if activation_dtype not in allowed:
        names = ", ".join("None" if dtype is None else dtype_name(dtype) for dtype in allowed)
        refuse("activation_dtype", f"is {activation_dtype} for weights {weights}", f"give {names}")
    quantized = weights in FP8_FORMATS and activation_dtype in (None, E4M3)
    if (given.a1_scale is None) is not (given.a2_scale is None):
        lacking = "a1_scale" if given.a1_scale is None else "a2_scale"
        refuse(lacking, "is None", "give both scales of activations, or neither")
    for parameter in ("a1_scale", "a2_scale"):
        scale = getattr(given, parameter)
        if scale is None:
            continue
        if not quantized or weights in BLOCK_FORMATS:
            refuse(parameter, f"is given for weights {weights}", "only fp8_tensor and fp8_channel have static scales")
        if scale.numel() != 1 or scale.dtype is not torch.float32:
            refuse(parameter, f"is {describe(scale)}", "give float32 of one element")


def _check_side(given: Operands, side: str, weights: str) -> None:
    """Scales, global scale and bias of one projection."""
    weight, scale = getattr(given, side), getattr(given, side + "_scale")
    experts, rows = weight.shape[:2]
    columns = weight.shape[2] * (2 if weights in FP4_FORMATS else 1)
    shapes, dtypes = scale_shapes(weights, experts, rows, columns), scale_dtypes(weights)
    if weights == PLAIN:
        if scale is not None:
            refuse(side + "_scale", "is given", f"{dtype_name(weight.dtype)} weights have no scale")
    else:
        wanted = " or ".join(f"{dtype_name(dtypes[0])} {shape}" for shape in shapes)
        if scale is None:
            refuse(side + "_scale", "is None", f"give {wanted}")
        if list(scale.shape) not in shapes or scale.dtype not in dtypes:
            refuse(side + "_scale", f"is {describe(scale)}", f"give {wanted} for weights {weights}")
        if len(scale.shape) == 3 and not _dense_rows(scale):
            refuse(side + "_scale", f"has strides {scale.stride()}", "make it contiguous")
    if not _dense_rows(weight):
        refuse(side, f"has strides {weight.stride()}", "make it contiguous along its last dimension")
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
    """The map, what is added and the destination; where tensors are."""
    x, table = given.x, given.expert_map
    if table is not None and (table.ndim != 1 or table.dtype is not torch.int32 or not table.numel()):
        refuse("expert_map", f"is {describe(table)}", "give int32 [E_global], -1 for experts that are elsewhere")
    for parameter in ("residual", "out"):
        tensor = getattr(given, parameter)
        if tensor is not None and (tensor.shape != x.shape or tensor.dtype is not x.dtype):
            refuse(parameter, f"is {describe(tensor)}", f"give {describe(x)}")
    for parameter in _TENSORS:
        tensor = getattr(given, parameter)
        if tensor is None:
            continue
        if tensor.device != x.device:
            refuse(parameter, f"is on {tensor.device}", f"move it to {x.device}, where x is")
        if tensor.requires_grad and is_grad_enabled():
            refuse(parameter, "requires grad", "kernels are for inference; call under torch.no_grad()")


def _dense_rows(tensor: Tensor) -> bool:
    return tensor.stride(-1) == 1 or tensor.shape[-1] == 1


def bind(
    adapter: Any,
    problem: ExpertsProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a call runs: the checks, the common form of the weights, the destination, the launch."""
    launch, weights, activation = adapter.launch, problem.weights, problem.activation
    activation_dtype = getattr(torch, problem.activation_dtype)
    on_input = problem.apply_router_weight_on_input
    dtype, hidden, top_k = getattr(torch, problem.dtype), problem.hidden_size, problem.top_k
    has_residual, int32, float32 = problem.residual, torch.int32, torch.float32
    as_given = weights in (PLAIN, FP8_BLOCK)  # what kernels are given is what the caller gave
    forms = Forms(device)

    def examine(given: Operands, form: Any) -> None:
        """Check a call of a form that is new."""
        check(given, activation, activation_dtype)
        other = problem_of(key_of(given, activation, activation_dtype, on_input), device)
        names = [name for name in problem.__dataclass_fields__ if name != "device"]
        if any(getattr(other, name) != getattr(problem, name) for name in names):
            name = next(name for name in names if getattr(other, name) != getattr(problem, name))
            mine, its = getattr(problem, name), getattr(other, name)
            parameter = _PARAMETER_OF.get(name, name)
            refuse(parameter, f"makes {name} {its}", f"the plan is for {name} {mine}")
        forms.add(form)

    def run(given: Operands) -> Tensor:
        x = given.x
        if x.get_device() != device:
            result: Tensor = elsewhere(x.get_device())(given)
            return result
        form = _form_of_layer(given, device)
        if (
            form is None
            or form not in forms
            or not is_step(x, given.topk_weights, given.topk_ids, given.residual, given.out)
        ):
            examine(given, form)
        if as_given:
            w13 = Matrix(given.w13, given.w13_scale, None, given.w13_bias)
            w2 = Matrix(given.w2, given.w2_scale, None, given.w2_bias)
            alpha, limit = float(given.alpha), float(given.limit)
            values = Values(given.a1_scale, given.a2_scale, alpha, limit, given.expert_map)
        else:
            w13, w2, values = _layer(weights, given)
        return start(w13, w2, values, x, given.topk_weights, given.topk_ids, given.residual, given.out)

    def start(
        w13: Matrix,
        w2: Matrix,
        values: Values,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        residual: Tensor | None,
        out: Tensor | None,
    ) -> Tensor:
        if out is None:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.shape[0]:
            if residual is not None:
                values = values._replace(residual=residual)
            tick()
            launch(x, w13, w2, topk_weights, topk_ids, values, out)
        return out

    def step_of(layer: Operands) -> Callable[..., Tensor]:
        """The call of a plan, whose layer was checked and brought into form when it was prepared."""
        prepared = _layer(weights, layer)

        def step(
            x: Tensor, topk_weights: Tensor, topk_ids: Tensor, residual: Tensor | None, out: Tensor | None
        ) -> Tensor:
            if not is_step(x, topk_weights, topk_ids, residual, out):
                given = layer._replace(x=x, topk_weights=topk_weights, topk_ids=topk_ids, residual=residual, out=out)
                check(given, activation, activation_dtype)
                return run(given)
            return start(*prepared, x, topk_weights, topk_ids, residual, out)

        return step

    def is_step(x: Any, topk_weights: Any, topk_ids: Any, residual: Any, out: Any) -> bool:
        """Nothing that `check` would refuse of the tensors of tokens."""
        if not usable(x, dtype, device):
            return False
        shape = x.shape
        if len(shape) != 2 or shape[1] != hidden:
            return False
        routed = (shape[0], top_k)
        return (
            alike(topk_ids, routed, int32, device)
            and alike(topk_weights, routed, float32, device)
            and (alike(residual, shape, dtype, device) if has_residual else residual is None)
            and (out is None or alike(out, shape, dtype, device))
        )

    run.step_of = step_of  # type: ignore[attr-defined]
    return run


def _layer(weights: str, given: Operands) -> tuple[Matrix, Matrix, Values]:
    """What of a call does not change from step to step, as adapters are given it."""
    return (
        matrix(weights, given.w13, given.w13_scale, given.w13_global_scale, given.w13_bias),
        matrix(weights, given.w2, given.w2_scale, given.w2_global_scale, given.w2_bias),
        Values(given.a1_scale, given.a2_scale, float(given.alpha), float(given.limit), given.expert_map),
    )


_PARAMETER_OF = {
    "dtype": "x",
    "hidden_size": "x",
    "weights": "w13",
    "num_experts": "w13",
    "intermediate_size": "w13",
    "top_k": "topk_ids",
    "static_scales": "a1_scale",
}


def _form_of_layer(given: Operands, device: int) -> tuple[Any, ...] | None:
    """All that a check looks at but the tensors of tokens; None if only the check can tell."""
    alpha, limit = given.alpha, given.limit
    if type(alpha) not in (float, int) or type(limit) not in (float, int):
        return None
    form: list[Any] = [alpha, limit]
    add = form.append
    for part in (given.w13, given.w2, *given[_FIRST_OF_LAYER:_LAST_OF_LAYER], given.expert_map):
        if part is None:
            add(None)
            continue
        if not isinstance(part, Tensor) or (part.requires_grad and is_grad_enabled()):
            return None
        if not (part.is_cpu if device < 0 else part.get_device() == device and part.is_cuda):
            return None
        add(part.dtype)
        add(part.shape)
        add(part.stride())
    return tuple(form)
