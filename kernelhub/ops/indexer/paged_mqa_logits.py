"""`paged_mqa_logits`: the indexer's scores of the keys of a paged cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.op import Ask, Backend, Op
from kernelhub.dispatch.publish import publish
from kernelhub.ops.call_plan import CallPlan, prepares
from kernelhub.ops.indexer.adapter import PagedLogitsAdapter
from kernelhub.ops.indexer.layout import is_fused
from kernelhub.ops.indexer.paged_mqa_logits_call import bind, check, problem_of
from kernelhub.ops.indexer.problem import PAGED_MQA_LOGITS, PagedLogitsProblem
from kernelhub.ops.indexer.reference import paged_mqa_logits_reference
from kernelhub.ops.operators import Traced

_op: Op[PagedLogitsProblem] = Op(
    Contract.of(
        PAGED_MQA_LOGITS,
        problem_of=problem_of,
        adapter=PagedLogitsAdapter,
        bind=bind,
        reference=paged_mqa_logits_reference,
        example="kernelhub.ops.indexer.inputs:paged_logits_inputs",
    )
)
_get = _op.table.get
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class PagedLogitsPlan(CallPlan):
    """A kernel chosen for queries like these: ``run`` takes the arguments of `paged_mqa_logits` but ``backend``."""

    __slots__ = ()
    call = "q, k_cache, k_scale_cache, weights, block_table, seq_lens, max_seq_len, out"


def _memory(q: Tensor, weights: Tensor, max_seq_len: int, **others: Any) -> dict[str, Tensor]:
    return {"out": weights.new_empty((q.shape[0] * q.shape[1], max_seq_len), dtype=torch.float32)}


@publish(_op, prepares(_op, PagedLogitsPlan), traced=Traced(_memory))
def paged_mqa_logits(
    q: Tensor,
    k_cache: Tensor,
    k_scale_cache: Tensor | None,
    weights: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """Score the keys of a paged cache for the last tokens of each sequence: `mqa_logits` of a decode step.

    Args:
        q: ``[B, next_n, H, D]``, float8_e4m3fn, bfloat16, float16 or float32: the last `next_n` tokens of each
            sequence, more than one with speculation.
        k_cache: ``[pages, page_size, D]`` in the same dtype. Or, for a float8_e4m3fn q, uint8
            ``[pages, page_size, D + 4]`` or ``[pages, page_size, 1, D + 4]``: each page the bytes of all its values,
            then all its float32 scales.
        k_scale_cache: float32 ``[pages, page_size]``, positive, multiplies the scores of a key; None for none, and
            where `k_cache` holds them.
        weights: float32 ``[B * next_n, H]``; scales of q, of the heads and of the softmax belong in it.
        block_table: int32 ``[B, max_pages]``: the pages of each sequence; what lies beyond its length is not read.
        seq_lens: int32 ``[B]``: keys of each sequence, its `next_n` last tokens among them.
        max_seq_len: columns of the result; no sequence may be longer. Lengths and pages of tensors on a GPU are
            checked with ``KERNELHUB_CHECK=1`` only.
        out: destination, float32 ``[B * next_n, max_seq_len]``; it must overlap no operand.
        backend: this backend or kernel, or the first of these that can, or an error with all reasons.

    Returns:
        float32 ``[B * next_n, max_seq_len]``: token i of `next_n` sees the first ``seq_lens - next_n + 1 + i`` keys,
        the columns after them are -inf.

    Raises:
        InvalidArgument: an argument breaks this contract; the parameter is named.
        NoKernel: no kernel can run this, with the reason of each.

    Source:
        DeepSeek-V3.2 (2025), equation 1; `fp8_paged_mqa_logits` of DeepGEMM with ``clean_logits=True``, whose cache,
        also that of vLLM and SGLang, is the one of uint8.

    Example:
        >>> import torch, kernelhub
        >>> q, weights = torch.randn(2, 1, 64, 128), torch.rand(2, 64)
        >>> k_cache, table = torch.randn(5, 16, 128), torch.tensor([[3, 1], [4, 0]], dtype=torch.int32)
        >>> lengths = torch.tensor([20, 3], dtype=torch.int32)
        >>> logits = kernelhub.paged_mqa_logits(q, k_cache, None, weights, table, lengths, 32)
        >>> logits.isfinite().sum(1)
        tensor([20,  3])
    """
    if type(q) is not Tensor and isinstance(q, Tensor) and not isinstance(backend, Ask):
        traced: Tensor = _op.traced(**locals())
        return traced
    try:
        _, _, heads, width = q.shape
        key = (q.dtype, heads, width, k_cache.shape[1], k_scale_cache is not None or is_fused(k_cache))
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        check(q, k_cache, k_scale_cache, weights, block_table, seq_lens, max_seq_len, out)
        raise
    run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
    if run is None:
        check(q, k_cache, k_scale_cache, weights, block_table, seq_lens, max_seq_len, out)
        run = _op.decide(key, q.get_device(), backend)
    result: Tensor = run(q, k_cache, k_scale_cache, weights, block_table, seq_lens, max_seq_len, out)
    return result
