"""`route_experts`: which experts each token goes to, and with what weights."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.op import Ask, Backend, Op
from kernelhub.dispatch.publish import publish
from kernelhub.ops.call_plan import CallPlan, Fixed, prepares
from kernelhub.ops.moe.routing.adapter import RoutingAdapter
from kernelhub.ops.moe.routing.call import bind, check, groups_of, problem_of
from kernelhub.ops.moe.routing.problem import ROUTE_EXPERTS, RoutingProblem
from kernelhub.ops.moe.routing.reference import route_experts_reference
from kernelhub.ops.operators import Traced

_op: Op[RoutingProblem] = Op(
    Contract.of(
        ROUTE_EXPERTS,
        problem_of=problem_of,
        adapter=RoutingAdapter,
        bind=bind,
        reference=route_experts_reference,
        example="kernelhub.ops.moe.routing.inputs:routing_inputs",
    )
)
_get = _op.table.get
_GROUPS = (int, type(None))
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class RoutingPlan(CallPlan):
    """A kernel chosen for logits like these: ``run(logits, correction_bias=None, ...)`` is a whole call.

    Everything but tensors is as it was prepared.
    """

    __slots__ = ()
    call = "logits, correction_bias, scaling_factor, out_weights, out_ids"
    fixed: ClassVar[Fixed] = {
        "top_k": attrgetter("top_k"),
        "scoring": attrgetter("scoring"),
        "num_groups": attrgetter("num_groups"),
        "topk_groups": attrgetter("topk_groups"),
        "renormalize": attrgetter("renormalize"),
    }
    kept = ("scaling_factor",)


def _memory(logits: Tensor, top_k: int, **options: Any) -> dict[str, Tensor]:
    shape = (logits.shape[0], top_k)
    weights = logits.new_empty(shape, dtype=torch.float32)
    return {"out_weights": weights, "out_ids": logits.new_empty(shape, dtype=torch.int32)}


@publish(_op, prepares(_op, RoutingPlan), traced=Traced(_memory, ("out_weights", "out_ids")))
def route_experts(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    num_groups: int | None = None,
    topk_groups: int | None = None,
    correction_bias: Tensor | None = None,
    renormalize: bool = False,
    scaling_factor: float = 1.0,
    out_weights: Tensor | None = None,
    out_ids: Tensor | None = None,
    backend: Backend = None,
) -> tuple[Tensor, Tensor]:
    """Choose the experts that each token goes to, and their weights.

    Scores are computed in float32. Experts are ranked by score plus `correction_bias`; without a bias by their
    logits, of which every score is a monotone function, so that ids are exact. Of equals the lowest id is first. A
    NaN logit counts as -inf and +inf as the largest float32; a token whose logits are all -inf goes to the first
    experts with weight zero. Ids are always valid and never the same twice in a row.

    Args:
        logits: ``[T, E]``, float32, float16 or bfloat16.
        top_k: experts per token, 1 to E.
        scoring: ``"softmax"`` over all experts, ``"sigmoid"`` of each, or ``"softmax_after_topk"`` over the chosen.
        num_groups: groups of equally many consecutive experts, of which a token goes to `topk_groups`: those whose
            best expert, or with a bias whose best two in sum, rank highest. None, 0 and 1 mean no groups.
        topk_groups: groups that a token may go to.
        correction_bias: float32 ``[E]``, added for ranking only.
        renormalize: divide the chosen weights by their sum: after ``"softmax"`` exactly, however small it is; after
            ``"sigmoid"`` by the sum plus 1e-20, as DeepSeek-V3's own code does; after ``"softmax_after_topk"`` the sum
            is one already.
        scaling_factor: what weights are multiplied by, last.
        out_weights: destination of the weights, float32 ``[T, top_k]``.
        out_ids: destination of the ids, int32 ``[T, top_k]``.
        backend: this backend or kernel, or the first of these that can, or an error with all reasons.

    Returns:
        Weights, float32, and ids, int32, both ``[T, top_k]``, best first.

    Raises:
        InvalidArgument: an argument breaks this contract; the parameter is named.
        NoKernel: no kernel can run this, with the reason of each.

    Source:
        DeepSeek-V2 (2024), section 2.1.2, and DeepSeek-V3 (2024), section 2.1.2; grouped_topk of vLLM and
        biased_grouped_topk of SGLang; the routers of Hugging Face transformers, which the tests compare it with.

    Example:
        >>> import torch, kernelhub
        >>> weights, ids = kernelhub.route_experts(torch.tensor([[1.0, 3.0, 2.0, 3.0]]), 2, renormalize=True)
        >>> weights.tolist(), ids.tolist()
        ([[0.5, 0.5]], [[1, 3]])
    """
    if type(logits) is not Tensor and isinstance(logits, Tensor) and not isinstance(backend, Ask):
        return cast(tuple[Tensor, Tensor], _op.traced(**locals()))
    try:
        key = (
            logits.dtype,
            logits.shape[1],
            top_k,
            scoring,
            *groups_of(num_groups, topk_groups),
            correction_bias is not None,
            renormalize,
            scaling_factor != 1.0,
        )
        hash(key)
        if type(renormalize) is not bool or type(top_k) is not int:
            raise TypeError
        if type(num_groups) not in _GROUPS or type(topk_groups) not in _GROUPS:
            raise TypeError
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        rest = (correction_bias, scaling_factor, out_weights, out_ids, renormalize)
        check(logits, top_k, scoring, num_groups, topk_groups, *rest)
        raise
    run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
    if run is None:
        rest = (correction_bias, scaling_factor, out_weights, out_ids, renormalize)
        check(logits, top_k, scoring, num_groups, topk_groups, *rest)
        run = _op.decide(key, logits.get_device(), backend)
    result: tuple[Tensor, Tensor] = run(logits, correction_bias, scaling_factor, out_weights, out_ids)
    return result
