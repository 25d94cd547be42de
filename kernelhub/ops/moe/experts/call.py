"""How a call of `fused_moe` becomes a launch: its key and problem, its run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad

from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lost import failed
from kernelhub.dispatch.problem import CHECKPOINT
from kernelhub.errors import InvalidArgument
from kernelhub.ops.arguments import Forms, alike, dtype_name, usable
from kernelhub.ops.formats import E4M3
from kernelhub.ops.known_calls import KnownCalls
from kernelhub.ops.moe.experts.adapter import ExpertsAdapter, Values
from kernelhub.ops.moe.experts.checks import WEIGHTS, Operands, check, refuse
from kernelhub.ops.moe.experts.problem import (
    ASKED_FORMATS,
    FEW,
    FP8_BLOCK,
    FP8_FORMATS,
    MANY,
    MOST_FEW,
    PLAIN,
    ExpertsProblem,
)
from kernelhub.ops.moe.experts.weights import Matrix, format_of, given_matrix
from kernelhub.ops.operands import PLAIN_DISPATCH, is_plain_view, may_overlap, span_of, tracing_state
from kernelhub.ops.packed import PackedWeight
from kernelhub.probes.device import facts_of

_ALPHA = Operands._fields.index("alpha")  # followed by the limit, the only others that are no tensors
_FIRST_OF_LAYER, _LAST_OF_LAYER = Operands._fields.index("w13_scale"), Operands._fields.index("a2_scale") + 1


def key_of(
    given: Operands, activation: str, activation_dtype: torch.dtype | str | None, on_input: bool
) -> tuple[Any, ...]:
    """The facets of a call."""
    w13, w2, scale = given.w13, given.w2, given.w13_scale
    shape, (rows, hidden) = w13.shape, given.x.shape
    if isinstance(w13, PackedWeight):
        scale_form, layout = w13.facts["scale"], w13.layout
        w13_bias, w2_bias = w13.tensors["bias"], None if isinstance(w2, Tensor) else w2.tensors["bias"]
    else:
        scale_form, layout = None if scale is None else (scale.dtype, scale.shape), CHECKPOINT
        w13_bias, w2_bias = given.w13_bias, given.w2_bias
    return (
        given.x.dtype,
        hidden,
        shape[0],
        shape[1],
        given.topk_ids.shape[1],
        w13.dtype,
        scale_form,
        activation,
        activation_dtype,
        layout,
        w13_bias is not None,
        w2_bias is not None,
        given.a1_scale is not None,
        on_input,
        given.expert_map is not None,
        given.residual is not None,
        rows > MOST_FEW,
    )


def with_layout(key: Any, layout: str) -> Any:
    """The key of the same call with weights of another layout."""
    return (*key[:9], layout, *key[10:])


def problem_of(key: Any, device: int) -> ExpertsProblem:
    """The problem that a key means on a device."""
    dtype, hidden, experts, rows, top_k, weight_dtype, scale, activation, activation_dtype, layout, *features = key
    scale_dtype, scale_shape = (None, ()) if scale is None else (scale[0], tuple(scale[1][1:]))
    weights = format_of(weight_dtype, rows, scale_dtype, scale_shape)
    if activation_dtype is None:
        activation_dtype = E4M3 if weights in FP8_FORMATS else dtype
    w13_bias, w2_bias, static, on_input, mapped, residual, many = features
    return ExpertsProblem(
        device=facts_of(device),
        dtype=dtype_name(dtype),
        weights=weights,
        activation_dtype=activation_dtype if isinstance(activation_dtype, str) else dtype_name(activation_dtype),
        num_experts=experts,
        top_k=top_k,
        hidden_size=hidden,
        intermediate_size=rows // 2,
        rows=MANY if many else FEW,
        weight_layout=layout,
        activation=activation,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        static_scales=static,
        apply_router_weight_on_input=on_input,
        expert_map=mapped,
        residual=residual,
    )


def asked_by(problem: ExpertsProblem) -> torch.dtype | str:
    """The argument `activation_dtype` of a call of the problem."""
    name = problem.activation_dtype
    return name if name in ASKED_FORMATS else getattr(torch, name)


def bind(
    adapter: Any,
    problem: ExpertsProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a call runs: the checks, the common form of the weights, the destination, the launch."""
    weights, activation = problem.weights, problem.activation
    activation_dtype = asked_by(problem)
    on_input = problem.apply_router_weight_on_input
    # What kernels are given is what the caller gave.
    as_given = weights in (PLAIN, FP8_BLOCK) and problem.weight_layout == CHECKPOINT
    forms, fits, start = Forms(device), _fits_of(problem, device), _start_of(adapter, tick)
    calls = KnownCalls(adapter.launch)
    # An audit replaces `launch`, and sees all calls.
    repeats = type(adapter).repeated is not ExpertsAdapter.repeated and "launch" not in vars(adapter)
    recognise = calls.launches if repeats else calls.holds
    arrange = None if type(adapter).arrange is ExpertsAdapter.arrange else adapter.arrange

    def examine(given: Operands) -> None:
        """Check a call of a form that is new."""
        check(given, activation, activation_dtype, on_input)
        other = problem_of(key_of(given, activation, activation_dtype, on_input), device)
        names = [name for name in problem.__dataclass_fields__ if name not in ("device", "rows")]
        if any(getattr(other, name) != getattr(problem, name) for name in names):
            name = next(name for name in names if getattr(other, name) != getattr(problem, name))
            mine, its = getattr(problem, name), getattr(other, name)
            parameter = _PARAMETER_OF.get(name, name)
            refuse(parameter, f"makes {name} {its}", f"the plan is for {name} {mine}")

    def run(given: Operands, checked: bool = False) -> Tensor:
        """`checked`: the call was checked, and this function made for it."""
        x = given.x
        if x.get_device() != device:
            result: Tensor = elsewhere(x.get_device())(given)
            return result
        try:
            alpha, limit, out = given.alpha, given.limit, given.out
            key: Any = None
            if not x.is_nested and type(alpha) is float and type(limit) is float:
                key = x.shape, alpha, limit, out is None
            made = out
            if out is None and key in calls:
                made = torch.empty_like(x, memory_format=torch.contiguous_format)
            tensors = (*given[:_ALPHA], *given[_ALPHA + 2 : -1], made)
            state: int = recognise(key, tensors)
            if state == 2 and made is not None:
                tick()
                return made
            if not state:
                if not fits(x, given.topk_weights, given.topk_ids, given.residual, out):
                    form = None
                elif out is None:
                    form = _form_of_layer(given, device, 0, 0)
                else:
                    form = _form_of_layer(given, device, out.data_ptr(), out.nbytes)
                if form is None or form not in forms:
                    if not checked:
                        examine(given)
                    forms.add(form)
                if made is None:
                    made = torch.empty_like(x, memory_format=torch.contiguous_format)
                    tensors = (*tensors[:-1], made)
                calls.learn(key, tensors, 1)
            w13, w2 = given.w13, given.w2
            if as_given and not isinstance(w13, PackedWeight) and not isinstance(w2, PackedWeight):
                first = Matrix(w13, given.w13_scale, None, given.w13_bias)
                second = Matrix(w2, given.w2_scale, None, given.w2_bias)
                values = Values(given.a1_scale, given.a2_scale, float(alpha), float(limit), given.expert_map)
            else:
                first, second, values = _layer(weights, given)
            if arrange is not None and x.shape[0]:
                first, second = arrange(first, second)
            routing, residual = (given.topk_weights, given.topk_ids), given.residual
            result = start(first, second, values, x, *routing, residual, made)
            if state and repeats and x.shape[0]:
                values = values if residual is None else values._replace(residual=residual)
                calls.attach(key, tensors, adapter.repeated, x, first, second, *routing, values, made)
            return result
        except InvalidArgument:
            raise
        except Exception:
            examine(given)  # names an operand that no kernel can read, such as one that torch transforms
            raise

    return run


def step_of(bound: Bound, layer: Operands) -> Callable[..., Tensor]:
    """The call of a plan, whose layer's weights were checked and converted when it was prepared.

    Its last argument is another layer's weights. A plan without weights needs them in each call.
    """
    problem: ExpertsProblem = bound.selection.problem
    run, activation, activation_dtype = bound.run, problem.activation, asked_by(problem)
    fits, start = _fits_of(problem, bound.device), _start_of(bound.adapter, bound.counter.__next__)
    spans = [span_of(tensor) for tensor in _of_layer(layer) if tensor is not None]
    calls = KnownCalls()
    prepared: tuple[Any, ...] = ()
    fixed: tuple[Tensor, ...] = ()  # tensors of the layer that kernels are given
    adapter, tick, repeats = bound.adapter, bound.counter.__next__, False
    whole = KnownCalls(adapter.launch)
    if layer.w13 is not None:
        w13, w2, values = _layer(problem.weights, layer)
        prepared = (*adapter.arrange(w13, w2), values)
        fixed = tuple(one for part in prepared for one in part if isinstance(one, Tensor))
        # If kernels read copies, the caller's own tensors are not among what a repeated launch compares `out` with.
        own = all(any(one is other for other in fixed) for one in _of_layer(layer) if one is not None)
        repeats = own and type(adapter).repeated is not ExpertsAdapter.repeated and "launch" not in vars(adapter)

    def step(
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        residual: Tensor | None,
        out: Tensor | None,
        weights: tuple[Any, ...] = (),
    ) -> Tensor:
        try:
            key = None if x.is_nested else (x.shape, out is None)
            given = (x, topk_weights, topk_ids, residual, out)
            again, state = repeats and not weights and HUB.known_of is not None, 0
            if again and (out is not None or key in whole):
                made = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
                state = whole.launches(key, (*given[:-1], *fixed, made))
                if state == 2:
                    tick()
                    return made
            as_before = state == 1 or calls.holds(key, given)
            if prepared and not weights and (as_before or fits(*given)):
                if not as_before:
                    calls.learn(key, given, 1)
                first = last = 0
                if out is not None:
                    first = out.data_ptr()
                    last = first + out.nbytes
                for begin, end in spans:
                    if begin < last and end > first:
                        break
                else:
                    result = start(*prepared, x, topk_weights, topk_ids, residual, out)
                    if again and x.shape[0]:
                        known, (first_product, second_product, factors) = (*given[:-1], *fixed, result), prepared
                        factors = factors if residual is None else factors._replace(residual=residual)
                        launched = x, first_product, second_product, topk_weights, topk_ids, factors, result
                        if state:
                            whole.attach(key, known, adapter.repeated, *launched)
                        else:
                            whole.learn(key, known, 1)
                    return result
        except InvalidArgument:
            raise
        except Exception:
            check(called(x, topk_weights, topk_ids, residual, out, weights), activation, activation_dtype)
            raise
        if not (prepared or weights):
            refuse("w13", "is missing", "the plan was prepared with its shape alone; give it to run")
        call = called(x, topk_weights, topk_ids, residual, out, weights)
        if not weights:
            check(call, activation, activation_dtype)
        returned: Tensor = run(call)
        return returned

    def called(x: Any, topk_weights: Any, topk_ids: Any, residual: Any, out: Any, weights: tuple[Any, ...]) -> Operands:
        others = dict(zip(WEIGHTS, weights, strict=True)) if weights else {}
        return layer._replace(x=x, topk_weights=topk_weights, topk_ids=topk_ids, residual=residual, out=out, **others)

    return step


def _fits_of(problem: ExpertsProblem, device: int) -> Callable[[Any, Any, Any, Any, Any], bool]:
    """The function that shows whether `check` would accept the tensors of tokens."""
    dtype, hidden, top_k = getattr(torch, problem.dtype), problem.hidden_size, problem.top_k
    has_residual, int32, float32 = problem.residual, torch.int32, torch.float32
    single = 1 in (top_k, hidden)  # then a token has one element, which is contiguous whatever it is a view of

    def fits(x: Any, topk_weights: Any, topk_ids: Any, residual: Any, out: Any) -> bool:
        if not usable(x, dtype, device):
            return False
        shape = x.shape
        if len(shape) != 2 or shape[1] != hidden:
            return False
        routed = (shape[0], top_k)
        if not (
            alike(topk_ids, routed, int32, device)
            and alike(topk_weights, routed, float32, device)
            and (alike(residual, shape, dtype, device) if has_residual else residual is None)
            and forward_ad._current_level < 0
            and tracing_state() is None
        ):
            return False
        dense = x.is_contiguous() and topk_ids.is_contiguous() and topk_weights.is_contiguous()
        if residual is not None:
            dense = dense and residual.is_contiguous()
        if not dense:
            views = [tensor for tensor in (x, topk_ids, topk_weights, residual) if tensor is not None]
            if not all(tensor.is_contiguous() or is_plain_view(tensor) for tensor in views):
                return False
        if (
            shape[0] == 1
            and single
            and any(tensor is not None and tensor.is_neg() for tensor in (x, topk_weights, residual))
        ):
            return False
        if out is None:
            return True
        if not alike(out, shape, dtype, device) or not out.is_contiguous():
            return False
        if not dense:
            return not may_overlap(out, [tensor for tensor in views if tensor is not out])
        start = out.data_ptr()
        size = out.nbytes
        # Two spans of bytes are apart if the one begins where the other ends, or later.
        return (
            (out is x or not -size < x.data_ptr() - start < size)
            and (residual is None or out is residual or not -size < residual.data_ptr() - start < size)
            and not -topk_ids.nbytes < topk_ids.data_ptr() - start < size
            and not -topk_weights.nbytes < topk_weights.data_ptr() - start < size
        )

    return fits


def _start_of(adapter: Any, tick: Callable[[], int]) -> Callable[..., Tensor]:
    """What launches a call whose layer is in the form that adapters are given: the destination, the launch."""
    launch = adapter.launch

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
            try:
                launch(x, w13, w2, topk_weights, topk_ids, values, out)
            except Exception as error:
                failed(launch, error)
                raise
        return out

    return start


def _layer(weights: str, given: Operands) -> tuple[Matrix, Matrix, Values]:
    """What of a call does not change from step to step, as adapters are given it."""
    return (
        given_matrix(weights, given.w13, given.w13_scale, given.w13_global_scale, given.w13_bias),
        given_matrix(weights, given.w2, given.w2_scale, given.w2_global_scale, given.w2_bias),
        Values(given.a1_scale, given.a2_scale, float(given.alpha), float(given.limit), given.expert_map),
    )


_PARAMETER_OF = {
    "dtype": "x",
    "hidden_size": "x",
    "weights": "w13",
    "num_experts": "w13",
    "intermediate_size": "w13",
    "weight_layout": "w13",
    "top_k": "topk_ids",
    "static_scales": "a1_scale",
}


def _form_of_layer(given: Operands, device: int, start: int, size: int) -> tuple[Any, ...] | None:
    """All that a check reads except the tensors of tokens; None if only the full check can decide.

    Args:
        given: the call.
        device: index of its GPU, -1 for the CPU.
        start, size: address and bytes of the destination, which is contiguous; 0 bytes if there is none.
    """
    alpha, limit = given.alpha, given.limit
    if type(alpha) not in (float, int) or type(limit) not in (float, int):
        return None
    form: list[Any] = [alpha, limit]
    add = form.append
    parts: list[Any] = [given.w13, given.w2, *given[_FIRST_OF_LAYER:_LAST_OF_LAYER], given.expert_map]
    for place, part in enumerate(parts):
        if isinstance(part, PackedWeight):
            if place > 1:
                return None
            form += (part.op, part.layout, part.shape, part.dtype, part.facts["side"], part.facts["scale"])
            parts.extend(part.tensors.values())
            continue
        if part is None:
            add(None)
            continue
        if not isinstance(part, Tensor) or type(part).__torch_dispatch__ is not PLAIN_DISPATCH:
            return None
        if part.requires_grad and is_grad_enabled():
            return None
        if not (part.is_cpu if device < 0 else part.get_device() == device and part.is_cuda):
            return None
        add(part.dtype)
        add(part.shape)
        if part.is_contiguous():
            if part.numel() == 1 and part.is_neg():  # one element is contiguous whatever it is a view of
                return None
            add(None)
            if size:
                begin = part.data_ptr()
                if begin < start + size and begin + part.nbytes > start:
                    return None
        elif is_plain_view(part):
            add(part.stride())
            if size and part.data_ptr() < start + size and span_of(part)[1] > start:
                return None
        else:
            return None
    return tuple(form)


def _of_layer(given: Operands) -> Iterator[Any]:
    """The tensors of a layer, those of packed weights too."""
    for part in (given.w13, given.w2):
        if isinstance(part, PackedWeight):
            yield from part.tensors.values()
        else:
            yield part
    yield from given[_FIRST_OF_LAYER:_LAST_OF_LAYER]
    yield given.expert_map
