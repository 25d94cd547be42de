"""`topk_indices`: the keys that the indexer scored highest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.op import Ask, Backend, Op
from kernelhub.dispatch.publish import publish
from kernelhub.ops.call_plan import CallPlan, prepares
from kernelhub.ops.indexer.adapter import TopKAdapter
from kernelhub.ops.indexer.problem import TOPK_INDICES, TopKProblem
from kernelhub.ops.indexer.reference import topk_indices_reference
from kernelhub.ops.indexer.topk_indices_call import bind, check, problem_of
from kernelhub.ops.operators import Traced

_op: Op[TopKProblem] = Op(
    Contract.of(
        TOPK_INDICES,
        problem_of=problem_of,
        adapter=TopKAdapter,
        bind=bind,
        reference=topk_indices_reference,
        example="kernelhub.ops.indexer.inputs:topk_inputs",
    )
)
_get = _op.table.get
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class TopKPlan(CallPlan):
    """A kernel chosen for rows like these: ``run(logits, k, row_starts=None, row_ends=None, out=None)``."""

    __slots__ = ()
    call = "logits, k, row_starts, row_ends, out"


def _memory(logits: Tensor, k: int, **others: Any) -> dict[str, Tensor]:
    return {"out": logits.new_empty((logits.shape[0], k), dtype=torch.int32)}


@publish(_op, prepares(_op, TopKPlan), traced=Traced(_memory))
def topk_indices(
    logits: Tensor,
    k: int,
    row_starts: Tensor | None = None,
    row_ends: Tensor | None = None,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """Find the `k` highest logits of each row, exactly, and give their places in ascending order.

    The answer is one and the same for every kernel and every run: of equal logits the first are taken. -inf is never
    taken. NaN counts as higher than everything, so that it is not lost.

    Args:
        logits: float32 ``[T, S]``, as of `mqa_logits` and `paged_mqa_logits`.
        k: how many to take of each row.
        row_starts: int32 ``[T]``: the first column of each row; None for 0.
        row_ends: int32 ``[T]``: the column after each row's last one; None for S. What lies outside of a row's
            columns is not read.
        out: destination, int32 ``[T, k]``.
        backend: this backend or kernel, or the first of these that can, or an error with all reasons.

    Returns:
        int32 ``[T, k]``: places counted from the row's start, ascending; -1 after them where there are fewer than `k`.

    Raises:
        InvalidArgument: an argument breaks this contract; the parameter is named.
        NoKernel: no kernel can run this, with the reason of each.

    Source:
        DeepSeek-V3.2 (2025), equation 2; `top_k_per_row_prefill` of vLLM and `fast_topk_v2` of SGLang, whose places
        count from the row's start too but come in no order, and whose ties may fall anyhow.

    Example:
        >>> import torch, kernelhub
        >>> logits = torch.tensor([[3.0, -1.0, 7.0, 3.0], [2.0, 5.0, -torch.inf, -torch.inf]])
        >>> kernelhub.topk_indices(logits, 3)
        tensor([[ 0,  2,  3],
                [ 0,  1, -1]], dtype=torch.int32)
    """
    if type(logits) is not Tensor and isinstance(logits, Tensor) and not isinstance(backend, Ask):
        traced: Tensor = _op.traced(**locals())
        return traced
    key = (k, row_starts is not None, row_ends is not None)
    try:
        device = logits.get_device()
        run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
    except (AttributeError, TypeError, RuntimeError):
        check(logits, k, row_starts, row_ends, out)
        raise
    if run is None:
        check(logits, k, row_starts, row_ends, out)
        run = _op.decide(key, device, backend)
    result: Tensor = run(logits, k, row_starts, row_ends, out)
    return result
