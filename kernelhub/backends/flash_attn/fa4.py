"""FlashAttention-4, through its public functions, compiled at the first call of a configuration.

A window without a limit is None: a -1 on one side alone is a limit like any other, and a causal call with it gave zeros
(NVIDIA/TransformerEngine#3528).
"""

from __future__ import annotations

from typing import Any

import torch
from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
from torch import Tensor

from kernelhub.backends.flash_attn.operands import NO_LIMIT, Ends, FlashAdapter, keep_tail
from kernelhub.backends.shared.operands import row_major
from kernelhub.ops.attention.adapter import DenseStep, PagedStep, ProblemT, StepT
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.problem import AttentionProblem, PagedAttentionProblem


class FlashAttention4(FlashAdapter[ProblemT, StepT]):
    """Shared by the kernels of both ops. Keys are never split: a sink would have to be counted in one part only."""

    knows_sinks = True
    loads_tiles = True

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, ends: Ends, values: Values, out: Tensor, wants_lse: bool
    ) -> Tensor | None:
        sinks = None if values.sinks is None else row_major(values.sinks)
        features = _features(values) | {"learnable_sink": sinks, "num_splits": 1, "return_lse": wants_lse}
        with torch.cuda.device_of(q):  # it compiles for the current device and launches there
            if ends.max_seqlen_k is None:
                result, lse = flash_attn_func(q, k, v, **features)
            else:
                result, lse = flash_attn_varlen_func(
                    q,
                    k,
                    v,
                    cu_seqlens_q=ends.cu_seqlens_q,
                    cu_seqlens_k=ends.cu_seqlens_k,
                    max_seqlen_q=ends.max_seqlen_q,
                    max_seqlen_k=ends.max_seqlen_k,
                    seqused_k=ends.seqused_k,
                    page_table=ends.page_table,
                    **features,
                )
        keep_tail(out, result, ends)
        found: Tensor | None = lse
        return found

    def workspace_bytes(self, num_seqs: int, num_tokens: int, max_kv_len: int) -> int:
        return self.result_bytes(num_tokens)


class Dense(FlashAttention4[AttentionProblem, DenseStep]):
    """`attention`, batched or ragged."""


class Paged(FlashAttention4[PagedAttentionProblem, PagedStep]):
    """`paged_attention`, prefill and mixed."""


def _features(values: Values) -> dict[str, Any]:
    causal = values.window_right == 0
    left = None if values.window_left < 0 else min(values.window_left, NO_LIMIT)
    right = None if causal or values.window_right < 0 else min(values.window_right, NO_LIMIT)
    return {"softmax_scale": values.scale, "causal": causal, "window_size": (left, right)}
