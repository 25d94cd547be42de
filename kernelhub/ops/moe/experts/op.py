"""`fused_moe`: runs each token through its experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.op import Backend, DryRun, Op, ParsedCall
from kernelhub.dispatch.plan import publish
from kernelhub.dispatch.problem import CHECKPOINT
from kernelhub.dispatch.selection import Selection
from kernelhub.ops.arguments import check_is_tensor
from kernelhub.ops.call_plan import CallPlan
from kernelhub.ops.moe.experts.adapter import W2, W13, ExpertsAdapter
from kernelhub.ops.moe.experts.call import asked_by, bind, key_of, problem_of, step_of, with_layout
from kernelhub.ops.moe.experts.checks import NAME, WEIGHTS, Operands, check, refuse
from kernelhub.ops.moe.experts.problem import FUSED_MOE, ExpertsProblem
from kernelhub.ops.moe.experts.reference import fused_moe_reference
from kernelhub.ops.moe.experts.weights import PACKED_PARTS
from kernelhub.ops.operands import check_flag
from kernelhub.ops.operators import Traced
from kernelhub.ops.packed import PackedWeight, PackingPlan, layout_of, prepared, remembered

_op: Op[ExpertsProblem] = Op(
    Contract.of(
        FUSED_MOE,
        problem_of=problem_of,
        adapter=ExpertsAdapter,
        bind=bind,
        reference=fused_moe_reference,
        example="kernelhub.ops.moe.experts.inputs:moe_inputs",
    )
)
_get = _op.table.get
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


_OF_LAYER = {
    "weights": W13,
    "num_experts": W13,
    "hidden_size": W13,
    "intermediate_size": W13,
    "w13_bias": "w13_bias",
    "w2_bias": "w2_bias",
}


class ExpertsPlan(CallPlan, PackingPlan):
    """A kernel selected for a layer: ``run(x, topk_weights, topk_ids, residual=None, out=None)`` is a whole call.

    Weights with their scales and biases, the map and everything else are those it was prepared with, which it keeps
    alive; where the kernel needs them packed and they were not, it keeps them packed instead. The weights of another
    layer of the same form may be given to a run by keyword, all of them: ``run(..., w13=w13, w2=w2)``; a plan that was
    prepared with meta tensors for them has none, and must be given them. `pack` gives packed ones to keep or to give.
    ``plan.tiles(num_tokens)`` says which sizes a call takes and whether they are measured ones.
    """

    __slots__ = ()
    repeats = False
    call = "x, topk_weights, topk_ids, residual, out"
    weights = WEIGHTS

    def __init__(self, bound: Bound, parsed: ParsedCall) -> None:
        problem, given = bound.selection.problem, parsed.arguments[0]
        parsed.check_kept(NAME, "a1_scale", "a2_scale", "expert_map")
        nothing = given.x.new_empty(0)  # the layer is kept, not the tokens it was prepared with
        layer = given._replace(x=nothing, topk_weights=nothing, topk_ids=nothing, residual=None, out=None)
        if parsed.shapes.isdisjoint(WEIGHTS):
            if problem.weight_layout != layout_of(given.w13):  # the kernel reads no other
                layer = _with_packed(layer, *_packed(bound.selection, bound.adapter, layer))
        else:
            layer = layer._replace(**dict.fromkeys(WEIGHTS))
        weights = [getattr(layer, name) for name in WEIGHTS]
        values = {"activation": problem.activation, "activation_dtype": asked_by(problem)}
        values |= {"apply_router_weight_on_input": problem.apply_router_weight_on_input}
        values |= {name: getattr(layer, name) for name in ("a1_scale", "a2_scale", "alpha", "limit", "expert_map")}
        super().__init__(_op, bound, parsed, run=step_of(bound, layer), values=values, weights=weights)

    def pack(
        self,
        w13: Tensor,
        w2: Tensor,
        *,
        w13_scale: Tensor | None = None,
        w2_scale: Tensor | None = None,
        w13_global_scale: Tensor | None = None,
        w2_global_scale: Tensor | None = None,
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
    ) -> tuple[PackedWeight, PackedWeight]:
        """A layer's weights in the layout that this plan's kernel reads, for `fused_moe` in place of w13 and w2.

        Each holds its scales and its bias, which are not given beside it.

        Args:
            w13, w2, w13_scale, w2_scale, w13_global_scale, w2_global_scale, w13_bias, w2_bias: as of `fused_moe`.

        Raises:
            InvalidArgument: they are no layer like that the plan was prepared for.
        """
        about = (w13_scale, w2_scale, w13_global_scale, w2_global_scale, w13_bias, w2_bias)
        layer = _layer_of(self.selection.problem, w13, w2, *about)
        return _packed(self.selection, self.adapter, layer)

    def tiles(self, num_tokens: int) -> str:
        """The tile sizes of a call of so many tokens and their source; "" if the kernel has one size."""
        words: str = self.adapter.tiles(num_tokens)
        return words


def _layer_of(
    problem: ExpertsProblem,
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor | None,
    w2_scale: Tensor | None,
    w13_global_scale: Tensor | None,
    w2_global_scale: Tensor | None,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
) -> Operands:
    """A layer's tensors as a call of the problem without tokens has them; an error if it has others."""
    for side, weight in ((W13, w13), (W2, w2)):
        check_is_tensor(NAME, side, weight)
    x = w13.new_empty((0, problem.hidden_size), dtype=getattr(torch, problem.dtype))
    ids = x.new_empty((0, problem.top_k), dtype=torch.int32)
    one = x.new_ones(1, dtype=torch.float32) if problem.static_scales else None
    given = Operands(
        x=x,
        w13=w13,
        w2=w2,
        topk_weights=ids.float(),
        topk_ids=ids,
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        w13_global_scale=w13_global_scale,
        w2_global_scale=w2_global_scale,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        a1_scale=one,
        a2_scale=one,
        alpha=1.0,
        limit=1.0,
        expert_map=None,
        residual=None,
        out=None,
    )
    activation_dtype = asked_by(problem)
    check(given, problem.activation, activation_dtype)
    key = key_of(given, problem.activation, activation_dtype, problem.apply_router_weight_on_input)
    mine = problem_of(key, w13.get_device())
    for name, parameter in _OF_LAYER.items():
        if getattr(mine, name) != getattr(problem, name):
            refuse(parameter, f"makes {name} {getattr(mine, name)}", f"the plan is for {name} {getattr(problem, name)}")
    return given


def _packed(selection: Selection[Any], adapter: Any, layer: Operands) -> tuple[PackedWeight, PackedWeight]:
    """w13 and w2 of a layer that was checked, in the layout that the kernel packs to.

    Each holds its scales and its bias, because a layout that moves rows moves those too.
    """
    kernel = selection.kernel
    assert kernel is not None
    made = []
    for side in (W13, W2):
        parts = [getattr(layer, side + suffix) for suffix in ("", "_scale", "_global_scale", "_bias")]
        weight, scale = parts[:2]
        facts = {
            "side": side,
            "format": selection.problem.weights,
            "scale": None if scale is None else (scale.dtype, tuple(scale.shape)),
            "bias_dtype": None if parts[3] is None else parts[3].dtype,
        }
        if kernel.packs_to:
            tensors, unpacker = adapter.pack(side, *parts)
        else:
            tensors, unpacker = dict(zip(PACKED_PARTS, parts, strict=True)), None
        layout = kernel.packs_to or CHECKPOINT
        about = (tuple(weight.shape), weight.dtype, facts, unpacker)
        made.append(remembered(PackedWeight(layout, NAME, kernel.name, tensors, *about)))
    return made[0], made[1]


def _with_packed(layer: Operands, w13: PackedWeight, w2: PackedWeight) -> Operands:
    """The layer with packed weights in place of its own."""
    return layer._replace(
        w13=w13,
        w2=w2,
        w13_scale=None,
        w2_scale=None,
        w13_global_scale=None,
        w2_global_scale=None,
        w13_bias=None,
        w2_bias=None,
    )


def _prepare(*args: Any, backend: Backend = None, packing: bool = False, **kwargs: Any) -> ExpertsPlan:
    """Choose once for a layer like this: arguments as of `fused_moe`.

    With `packing` the weights are given as in a checkpoint, and the caller packs them with the plan's `pack`, or lets
    the plan keep them packed: kernels that need that are ranked with the others.
    """
    parsed = _op.parse(backend, args, kwargs)
    return prepared(_op, parsed, backend, with_layout, packing, lambda bound: ExpertsPlan(bound, parsed))


def _memory(x: Tensor, **others: Any) -> dict[str, Tensor]:
    return {"out": x.new_empty(x.shape)}


@publish(_op, _prepare, traced=Traced(_memory, in_place=("x", "residual")))
def fused_moe(
    x: Tensor,
    w13: Tensor | PackedWeight,
    w2: Tensor | PackedWeight,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = "silu",
    activation_dtype: torch.dtype | str | None = None,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    w13_global_scale: Tensor | None = None,
    w2_global_scale: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    apply_router_weight_on_input: bool = False,
    expert_map: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """Run each token through its experts and sum their weighted outputs.

    For a token t and its k-th choice e, with weight w = topk_weights[t, k]::

        gate, up = x[t] @ w13[e].T + w13_bias[e]
        out[t] += w * ((act(gate) * up) @ w2[e].T + w2_bias[e])

    Products are summed in float32. The result of the activation is rounded to the dtype of x. The output of an expert
    may be rounded to it too.

    Args:
        x: tokens ``[T, H]``, float32, float16 or bfloat16.
        w13: ``[E, 2I, H]``, the rows of gate, then those of up; contiguous along H. In the dtype of x; or
            float8_e4m3fn; or fp4, two a byte, as uint8 or float4_e2m1fn_x2 ``[E, 2I, H / 2]``, the first of two in the
            low four bits, or integers from -8 to 7 (MXINT4) as uint8 likewise, in two's complement. For interleaved
            gate and up rows (gpt-oss) give ``torch.cat([w[:, 0::2], w[:, 1::2]], 1)``, also for scales and biases. Or
            the packed w13 and w2 that a plan's `pack` returned, which contain their scales and biases.
        w2: ``[E, H, I]``, or ``[E, H, I / 2]``, in the same format.
        topk_weights: float32 ``[T, top_k]``.
        topk_ids: int32 ``[T, top_k]``; ids that name no expert (such as -1) are skipped.
        activation: ``"silu"``, ``"gelu"`` (exact) or ``"gelu_tanh"``, of the gate; or ``"swiglu_oai"``:
            ``g * sigmoid(alpha * g) * (u + 1)`` with g = min(gate, limit) and u = clamp(up, -limit, limit) (gpt-oss);
            ``"swiglu_clamped"``: the same times u, without the one (vLLM's SiluAndMulWithClamp has ``alpha=1.0``); or
            ``"swiglu_step"``: ``min(silu(gate), limit) * u`` (its SwigluStepAndMul).
        activation_dtype: dtype of the activations in the products: torch.float8_e4m3fn, or the dtype of x for
            weight-only quantisation. By default fp8 for fp8 weights, as in DeepSeek-V3 and vLLM, else the dtype of x.
            Quantised activations have a scale per 1 x 128 if weights have blocks, else per row: the largest magnitude,
            at least 1e-10, over 448. Or the name of a format with a larger error: for weights in blocks of 128 x 128
            ``"fp8_block"``, as engines quantise between separate kernels, and ``"fp8_block_gate_up"``, which also
            quantises gate and up; for MXFP4 and blocks with float8_e8m0fnu scales ``"mxfp8"``; for NVFP4 ``"nvfp4"``.
            These formats are opt-in; `kernelhub.ops.moe.experts.activations` states what each rounds.
        w13_scale: factor of quantised weights. Its shape and dtype determine the format. fp8: float32
            ``[E]`` or ``[E, 1]`` (tensor), ``[E, 2I]`` or ``[E, 2I, 1]`` (channel); or float32 or float8_e8m0fnu
            ``[E, ceil(2I / 128), ceil(H / 128)]`` (blocks of 128 x 128, I a multiple of 128). MXFP4: float8_e8m0fnu
            or uint8 ``[E, 2I, H / 32]``; MXINT4: bfloat16 of the same shape. NVFP4: float8_e4m3fn ``[E, 2I, H / 16]``.
        w2_scale: the same for w2.
        w13_global_scale: float32 ``[E]`` or ``[E, 1]``, a second factor of NVFP4 weights.
        w2_global_scale: the same for w2.
        w13_bias: ``[E, 2I]``, float32 or the dtype of x.
        w2_bias: ``[E, H]``, the same.
        a1_scale: float32 of one element, together with `a2_scale`: the static scale of x in fp8, only with fp8_tensor
            and fp8_channel weights; or the second scale of x in nvfp4, where it is required. It multiplies, as
            ``input_scale`` of checkpoints (the largest of a layer's experts).
        a2_scale: the same for the result of the activation.
        alpha: parameter of ``"swiglu_oai"`` and ``"swiglu_clamped"``.
        limit: parameter of these and of ``"swiglu_step"``, at least 0.
        apply_router_weight_on_input: multiply by w before the activation instead (Llama 4): gate and up are then
            ``w * (x @ w13.T) + w13_bias``.
        expert_map: int32 ``[E_global]``, for expert parallelism. Ids are global; the map gives the index of each expert
            in w13, or -1 for experts of other ranks. The result is this rank's share of the sum.
        residual: ``[T, H]`` in the dtype of x, added to the result, such as the output of a shared expert.
        out: destination ``[T, H]``; it may be `x` or `residual`.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        ``[T, H]`` in the dtype of x.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.

    Source:
        DeepSeek-V3 (2024), sections 2.1.2 and 3.3; fused_experts of vLLM; the modeling code of Hugging Face
        transformers, which the tests compare it with; OCP Microscaling Formats 1.0.

    Example:
        >>> import torch, kernelhub
        >>> x, w13, w2 = torch.randn(5, 32), torch.randn(8, 48, 32), torch.randn(8, 32, 24)
        >>> weights, ids = kernelhub.route_experts(torch.randn(5, 8), 2, renormalize=True)
        >>> kernelhub.fused_moe(x, w13, w2, weights, ids).shape
        torch.Size([5, 32])
    """
    if type(x) is not Tensor and isinstance(x, Tensor) and not isinstance(backend, DryRun):
        traced: Tensor = _op.traced(**locals())
        return traced
    if _op.again is not None:
        again: Tensor | None = _op.again(
            x,
            w13,
            w2,
            topk_weights,
            topk_ids,
            activation,
            activation_dtype,
            w13_scale,
            w2_scale,
            w13_global_scale,
            w2_global_scale,
            w13_bias,
            w2_bias,
            a1_scale,
            a2_scale,
            alpha,
            limit,
            apply_router_weight_on_input,
            expert_map,
            residual,
            out,
            backend,
        )
        if again is not None:
            return again
    given = Operands(
        x,
        w13,
        w2,
        topk_weights,
        topk_ids,
        w13_scale,
        w2_scale,
        w13_global_scale,
        w2_global_scale,
        w13_bias,
        w2_bias,
        a1_scale,
        a2_scale,
        alpha,
        limit,
        expert_map,
        residual,
        out,
    )
    try:
        if apply_router_weight_on_input is not False and apply_router_weight_on_input is not True:
            apply_router_weight_on_input = check_flag(
                NAME, "apply_router_weight_on_input", apply_router_weight_on_input
            )
        key = key_of(given, activation, activation_dtype, apply_router_weight_on_input)
        run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        check(given, activation, activation_dtype, apply_router_weight_on_input)
        raise
    if run is None:
        check(given, activation, activation_dtype, apply_router_weight_on_input)
        fresh: Tensor = _op.decide(key, x.get_device(), backend)(given, True)
        return fresh
    result: Tensor = run(given)
    return result
