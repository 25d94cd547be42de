"""WHAT can be asked: one folder per family of ops.

In each, an op's typed function with its contract, its torch reference and its inputs.
"""

from __future__ import annotations

from typing import Any

from kernelhub.dispatch.op import OpFunction


def functions() -> tuple[OpFunction[Any, Any, Any], ...]:
    """Every op there is."""
    from kernelhub.ops.attention.attention import attention
    from kernelhub.ops.attention.paged_attention import paged_attention
    from kernelhub.ops.indexer.mqa_logits import mqa_logits
    from kernelhub.ops.indexer.paged_mqa_logits import paged_mqa_logits
    from kernelhub.ops.indexer.topk_indices import topk_indices
    from kernelhub.ops.linear_attention.linear_attention import linear_attention
    from kernelhub.ops.merge.merge_attention_states import merge_attention_states
    from kernelhub.ops.mla.concat_mla_k import concat_mla_k

    return (
        attention,
        paged_attention,
        merge_attention_states,
        concat_mla_k,
        mqa_logits,
        paged_mqa_logits,
        topk_indices,
        linear_attention,
    )
