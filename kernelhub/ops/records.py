"""Every op as data: what its problems are, without its function, so that nothing here needs torch."""

from __future__ import annotations

from typing import Any

from kernelhub.dispatch.contract import OpRecord
from kernelhub.ops.attention.problem import ATTENTION, PAGED_ATTENTION
from kernelhub.ops.gemm.fp4.problem import FP4_GEMM
from kernelhub.ops.gemm.fp8.batched.problem import BMM_FP8
from kernelhub.ops.gemm.fp8.problem import FP8_GEMM
from kernelhub.ops.gemm.grouped.problem import GROUPED_GEMM
from kernelhub.ops.indexer.problem import MQA_LOGITS, PAGED_MQA_LOGITS, TOPK_INDICES
from kernelhub.ops.linear_attention.problem import LINEAR_ATTENTION
from kernelhub.ops.merge.problem import MERGE_ATTENTION_STATES
from kernelhub.ops.mla.attention.problem import MLA_ATTENTION
from kernelhub.ops.mla.cache.problem import WRITE_MLA_CACHE
from kernelhub.ops.mla.concat.problem import CONCAT_MLA_K
from kernelhub.ops.moe.experts.problem import FUSED_MOE
from kernelhub.ops.moe.routing.problem import ROUTE_EXPERTS
from kernelhub.ops.quant.problem import (
    DEQUANTIZE_FP8,
    DEQUANTIZE_MXFP4,
    DEQUANTIZE_MXFP8,
    DEQUANTIZE_NVFP4,
    QUANTIZE_FP8,
    QUANTIZE_MXFP4,
    QUANTIZE_MXFP8,
    QUANTIZE_NVFP4,
)

OPS: tuple[OpRecord[Any], ...] = (
    ATTENTION,
    PAGED_ATTENTION,
    MERGE_ATTENTION_STATES,
    MLA_ATTENTION,
    WRITE_MLA_CACHE,
    CONCAT_MLA_K,
    MQA_LOGITS,
    PAGED_MQA_LOGITS,
    TOPK_INDICES,
    LINEAR_ATTENTION,
    QUANTIZE_FP8,
    DEQUANTIZE_FP8,
    QUANTIZE_MXFP4,
    DEQUANTIZE_MXFP4,
    QUANTIZE_MXFP8,
    DEQUANTIZE_MXFP8,
    QUANTIZE_NVFP4,
    DEQUANTIZE_NVFP4,
    FP4_GEMM,
    BMM_FP8,
    FP8_GEMM,
    GROUPED_GEMM,
    FUSED_MOE,
    ROUTE_EXPERTS,
)
