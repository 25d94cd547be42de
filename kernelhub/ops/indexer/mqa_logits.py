"""`mqa_logits`: the indexer's scores of keys that stand one after another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.op import Ask, Backend, Op
from kernelhub.dispatch.publish import publish
from kernelhub.ops.call_plan import CallPlan, prepares
from kernelhub.ops.indexer.adapter import LogitsAdapter
from kernelhub.ops.indexer.mqa_logits_call import bind, check, problem_of
from kernelhub.ops.indexer.problem import MQA_LOGITS, LogitsProblem
from kernelhub.ops.indexer.reference import mqa_logits_reference
from kernelhub.ops.operators import Traced

_op: Op[LogitsProblem] = Op(
    Contract.of(
        MQA_LOGITS,
        problem_of=problem_of,
        adapter=LogitsAdapter,
        bind=bind,
        reference=mqa_logits_reference,
        example="kernelhub.ops.indexer.inputs:logits_inputs",
    )
)
_get = _op.table.get
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class LogitsPlan(CallPlan):
    """A kernel chosen for queries like these: ``run`` takes the arguments of `mqa_logits` but ``backend``."""

    __slots__ = ()
    call = "q, k, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke, out"


def _memory(q: Tensor, k: Tensor, weights: Tensor, **others: Any) -> dict[str, Tensor]:
    return {"out": weights.new_empty((q.shape[0], k.shape[0]), dtype=torch.float32)}


@publish(_op, prepares(_op, LogitsPlan), traced=Traced(_memory))
def mqa_logits(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor | None,
    weights: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """Score keys for each query: a weighted sum over the indexer's heads of the positive parts of q k^T.

    Args:
        q: ``[T, H, D]``, float8_e4m3fn, bfloat16, float16 or float32.
        k: ``[S, D]`` in the same dtype: the keys of all sequences, one head that all heads of q share.
        k_scale: float32 ``[S]``, positive, multiplies the scores of a key; None for none.
        weights: float32 ``[T, H]``; scales of q, of the heads and of the softmax belong in it.
        cu_seqlen_ks: int32 ``[T]``: the first key of each query.
        cu_seqlen_ke: int32 ``[T]``: the key after each query's last one. What lies outside of k is ignored.
        out: destination, float32 ``[T, S]``; it must overlap no operand.
        backend: this backend or kernel, or the first of these that can, or an error with all reasons.

    Returns:
        float32 ``[T, S]``: ``k_scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s])``, and -inf outside of a
        query's range.

    Raises:
        InvalidArgument: an argument breaks this contract; the parameter is named.
        NoKernel: no kernel can run this, with the reason of each.

    Source:
        DeepSeek-V3.2 (2025), equation 1; `fp8_mqa_logits` of DeepGEMM with ``clean_logits=True``.

    Example:
        >>> import torch, kernelhub
        >>> q, k, weights = torch.randn(4, 64, 128), torch.randn(10, 128), torch.rand(4, 64)
        >>> ends = torch.arange(7, 11, dtype=torch.int32)
        >>> logits = kernelhub.mqa_logits(q, k, None, weights, torch.zeros_like(ends), ends)
        >>> logits.shape, logits[0].isinf().sum()
        (torch.Size([4, 10]), tensor(3))
    """
    if type(q) is not Tensor and isinstance(q, Tensor) and not isinstance(backend, Ask):
        traced: Tensor = _op.traced(**locals())
        return traced
    try:
        _, heads, width = q.shape
        key = (q.dtype, heads, width, k_scale is not None)
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        check(q, k, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke, out)
        raise
    run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
    if run is None:
        check(q, k, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke, out)
        run = _op.decide(key, q.get_device(), backend)
    result: Tensor = run(q, k, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke, out)
    return result
