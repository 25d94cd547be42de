"""FlashAttention-2, through its public functions. They allocate the result, which `compute` returns."""

from __future__ import annotations

from typing import Any

import torch
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor

from kernelhub.backends.flash_attn.keyless import forget, with_keys
from kernelhub.backends.flash_attn.operands import (
    NO_LIMIT,
    Ends,
    FlashAdapter,
    bound_of_keys,
    bound_of_queries,
    is_limited_beyond,
    keep_tail,
    one_length,
)
from kernelhub.backends.shared.operands import is_aligned
from kernelhub.ops.attention.adapter import DenseStep, PagedStep, ProblemT, StepT
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.problem import AttentionProblem, PagedAttentionProblem


class FlashAttention2(FlashAdapter[ProblemT, StepT]):
    """Shared by the kernels of both ops."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, ends: Ends, values: Values, out: Tensor, wants_lse: bool
    ) -> Tensor | None:
        made = self.made(q, k, v, ends, values, wants_lse)
        result: Tensor = made[0] if wants_lse else made
        lse: Tensor | None = made[1] if wants_lse else None
        keep_tail(out, result, ends)
        return lse

    def made(self, q: Tensor, k: Tensor, v: Tensor, ends: Ends, values: Values, wants_lse: bool) -> Any:
        """What the library gives: the result, with the LSE as the second of a tuple if it is wanted."""
        if ends.cu_seqlens_q is not None:
            return self.ragged(q, k, v, ends, values, wants_lse, ends.cu_seqlens_k)
        batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
        if not is_limited_beyond(values, queries, keys):
            return flash_attn_func(q, k, v, return_attn_probs=wants_lse, **_features(values))
        flat = Ends(one_length(queries, batch, q), one_length(keys, batch, q), queries, keys)
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        made = self.ragged(q, k, v, flat, values, wants_lse, flat.cu_seqlens_k)
        return _unflattened(made, batch, wants_lse)

    def ragged(
        self, q: Tensor, k: Tensor, v: Tensor, ends: Ends, values: Values, wants_lse: bool, cu_seqlens_k: Tensor | None
    ) -> Any:
        """Ragged queries over ragged keys or pages."""
        assert ends.cu_seqlens_q is not None
        return flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=ends.cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=bound_of_queries(ends, q.shape[0], wants_lse),
            max_seqlen_k=bound_of_keys(ends.max_seqlen_q, ends.max_seqlen_k, values),
            return_attn_probs=wants_lse,
            block_table=ends.page_table,
            **_features(values),
        )

    def workspace_bytes(self, num_seqs: int, num_tokens: int, max_kv_len: int) -> int:
        return self.result_bytes(num_tokens)


class Dense(FlashAttention2[AttentionProblem, DenseStep]):
    """`attention`, batched or ragged."""

    def compute(self, q: Tensor, k: Tensor, v: Tensor, step: DenseStep, values: Values) -> Tensor:
        simple = step.cu_seqlens_q is None and values.sinks is None and values.scale > 0 and k.shape[1]
        if not simple or not (is_aligned(q) and is_aligned(k) and is_aligned(v)):
            return super().compute(q, k, v, step, values)
        made: Tensor = self.made(q, k, v, Ends(), values, False)
        return made.contiguous()


class Paged(FlashAttention2[PagedAttentionProblem, PagedStep]):
    """`paged_attention`, prefill and mixed; decode without splitting keys.

    The library's own choice of splits gave NaN over pages now and then (pytorch/torchtitan#3235); one split does not.
    """

    def made(self, q: Tensor, k: Tensor, v: Tensor, ends: Ends, values: Values, wants_lse: bool) -> Any:
        assert ends.seqused_k is not None
        assert ends.page_table is not None
        if ends.cu_seqlens_q is None:
            batch, queries = q.shape[:2]
            if is_limited_beyond(values, queries, ends.page_table.shape[1] * k.shape[1]):
                flat = ends._replace(cu_seqlens_q=one_length(queries, batch, q), max_seqlen_q=queries)
                return _unflattened(self.made(q.flatten(0, 1), k, v, flat, values, wants_lse), batch, wants_lse)
            return flash_attn_with_kvcache(
                q,
                k,
                v,
                cache_seqlens=ends.seqused_k,
                block_table=ends.page_table,
                num_splits=1,
                return_softmax_lse=wants_lse,
                **_features(values),
            )
        ends, blind = with_keys(ends, k.shape[1], q.shape[0])
        assert ends.seqused_k is not None
        cu_seqlens_k = torch.nn.functional.pad(ends.seqused_k.cumsum(0, dtype=torch.int32), (1, 0))
        made = self.ragged(q, k, v, ends, values, wants_lse, cu_seqlens_k)
        forget(blind, *(made[:2] if wants_lse else (made, None)))
        return made


def _unflattened(made: Any, batch: int, wants_lse: bool) -> Any:
    """What the library gives of ragged sequences of one length, as it gives it of a batch."""
    if not wants_lse:
        return made.unflatten(0, (batch, -1))
    return made[0].unflatten(0, (batch, -1)), made[1].unflatten(1, (batch, -1)).transpose(0, 1)


def _features(values: Values) -> dict[str, Any]:
    causal = values.window_right == 0
    right = -1 if causal else min(values.window_right, NO_LIMIT)
    return {
        "softmax_scale": values.scale,
        "causal": causal,
        "window_size": (min(values.window_left, NO_LIMIT), right),
        "softcap": values.softcap,
    }
