"""How a call of `fused_moe` becomes a launch: its key and problem, its run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from kernelhub.ops.arguments import dtype_name
from kernelhub.ops.formats import E4M3
from kernelhub.ops.moe.experts.adapter import Values
from kernelhub.ops.moe.experts.check import Operands, check, refuse
from kernelhub.ops.moe.experts.problem import FP8_FORMATS, ExpertsProblem
from kernelhub.ops.moe.experts.weights import Matrix, format_of, matrix
from kernelhub.probes.device import facts

_MOST_FORMS = 256  # of tensors that were checked, kept per plan
_FIRST_OF_LAYER, _LAST_OF_LAYER = Operands._fields.index("w13_scale"), Operands._fields.index("a2_scale") + 1


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
        None if scale is None else (scale.dtype, scale.shape[1:]),
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
    scale_dtype, scale_shape = (None, ()) if scale is None else (scale[0], tuple(scale[1]))
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
    has_residual = problem.residual
    seen: set[Any] = set()

    def examine(given: Operands, form: Any) -> None:
        """Check a call of a form that is new."""
        check(given, activation, activation_dtype)
        other = problem_of(key_of(given, activation, activation_dtype, on_input), device)
        if other != problem:
            names = problem.__dataclass_fields__
            name = next(name for name in names if getattr(other, name) != getattr(problem, name))
            mine, its = getattr(problem, name), getattr(other, name)
            parameter = _PARAMETER_OF.get(name, name)
            refuse(parameter, f"makes {name} {its}", f"the plan is for {name} {mine}")
        if len(seen) >= _MOST_FORMS:
            seen.clear()
        if form is not None:
            seen.add(form)

    def run(given: Operands) -> Tensor:
        x = given.x
        if x.get_device() != device:
            result: Tensor = elsewhere(x.get_device())(given)
            return result
        form = _form(given)
        if form is None or form not in seen:
            examine(given, form)
        return start(*_layer(weights, given), x, given.topk_weights, given.topk_ids, given.residual, given.out)

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
        if not (type(x) is type(topk_weights) is type(topk_ids) is Tensor):
            return False
        shape, place = x.shape, x.device
        if len(shape) != 2 or shape[1] != hidden or x.dtype is not dtype or x.get_device() != device or x.is_meta:
            return False
        routed = (shape[0], top_k)
        if topk_ids.shape != routed or topk_ids.dtype is not torch.int32 or topk_ids.device != place:
            return False
        if topk_weights.shape != routed or topk_weights.dtype is not torch.float32 or topk_weights.device != place:
            return False
        if (residual is not None) is not has_residual:
            return False
        for tensor in (residual, out):
            if tensor is not None and (
                type(tensor) is not Tensor
                or tensor.shape != shape
                or tensor.dtype is not dtype
                or tensor.device != place
            ):
                return False
        return not is_grad_enabled() or not any(
            tensor is not None and tensor.requires_grad for tensor in (x, topk_weights, residual, out)
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


def _form(given: Operands) -> tuple[Any, ...] | None:
    """All that a check looks at, of the number of tokens only whether tensors have it; None if one is no tensor."""
    form: list[Any] = [given.alpha, given.limit]
    grad = is_grad_enabled()
    layer: tuple[Any, ...] = (given.w13, given.w2, *given[_FIRST_OF_LAYER:_LAST_OF_LAYER], given.expert_map)
    try:
        tokens = given.x.shape[0]
        for item in (given.x, given.topk_weights, given.topk_ids, given.residual, given.out):
            if item is not None:
                form += (item.shape[0] == tokens, item.shape[1:], item.dtype, item.device)
            else:
                form.append(None)
        for part in layer:
            if part is not None:
                form += (part.shape, part.dtype, part.device, part.stride())
            else:
                form.append(None)
        if grad:
            form += [item.requires_grad for item in given if isinstance(item, Tensor)]
        made = tuple(form)
        hash(made)
    except (AttributeError, TypeError, IndexError):
        return None
    return made
