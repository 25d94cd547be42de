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
    from kernelhub.ops.gemm.fp8.batched.bmm_fp8 import bmm_fp8
    from kernelhub.ops.gemm.fp8.fp8_gemm import fp8_gemm
    from kernelhub.ops.merge.merge_attention_states import merge_attention_states
    from kernelhub.ops.mla.concat_mla_k import concat_mla_k

    return (attention, paged_attention, merge_attention_states, concat_mla_k, fp8_gemm, bmm_fp8)
