"""WHAT can be asked: one folder per family of ops.

In each, an op's typed function with its contract, its torch reference and its inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernelhub.dispatch.op import OpFunction


def functions() -> tuple[OpFunction[Any, Any, Any], ...]:
    """Every op there is."""
    from kernelhub.ops.attention.attention import attention
    from kernelhub.ops.attention.paged_attention import paged_attention
    from kernelhub.ops.gemm.fp4.fp4_gemm import fp4_gemm
    from kernelhub.ops.gemm.fp8.batched.bmm_fp8 import bmm_fp8
    from kernelhub.ops.gemm.fp8.fp8_gemm import fp8_gemm
    from kernelhub.ops.gemm.grouped.grouped_gemm import grouped_gemm
    from kernelhub.ops.indexer.mqa_logits import mqa_logits
    from kernelhub.ops.indexer.paged_mqa_logits import paged_mqa_logits
    from kernelhub.ops.indexer.topk_indices import topk_indices
    from kernelhub.ops.linear_attention.linear_attention import linear_attention
    from kernelhub.ops.merge.merge_attention_states import merge_attention_states
    from kernelhub.ops.mla.attention.mla_attention import mla_attention
    from kernelhub.ops.mla.cache.write_mla_cache import write_mla_cache
    from kernelhub.ops.mla.concat.concat_mla_k import concat_mla_k
    from kernelhub.ops.moe.experts.fused_moe import fused_moe
    from kernelhub.ops.moe.routing.route_experts import route_experts
    from kernelhub.ops.quant.fp8 import dequantize_fp8, quantize_fp8
    from kernelhub.ops.quant.mxfp4 import dequantize_mxfp4, quantize_mxfp4
    from kernelhub.ops.quant.mxfp8 import dequantize_mxfp8, quantize_mxfp8
    from kernelhub.ops.quant.nvfp4 import dequantize_nvfp4, quantize_nvfp4

    return (
        attention,
        paged_attention,
        merge_attention_states,
        mla_attention,
        write_mla_cache,
        concat_mla_k,
        mqa_logits,
        paged_mqa_logits,
        topk_indices,
        linear_attention,
        quantize_fp8,
        dequantize_fp8,
        quantize_mxfp4,
        dequantize_mxfp4,
        quantize_mxfp8,
        dequantize_mxfp8,
        quantize_nvfp4,
        dequantize_nvfp4,
        fp4_gemm,
        bmm_fp8,
        fp8_gemm,
        grouped_gemm,
        fused_moe,
        route_experts,
    )
