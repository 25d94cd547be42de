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
    from kernelhub.ops.gemm.fp4.fp4_gemm import fp4_gemm
    from kernelhub.ops.merge.merge_attention_states import merge_attention_states
    from kernelhub.ops.mla.concat_mla_k import concat_mla_k
    from kernelhub.ops.quant.fp8 import dequantize_fp8, quantize_fp8
    from kernelhub.ops.quant.mxfp4 import dequantize_mxfp4, quantize_mxfp4
    from kernelhub.ops.quant.mxfp8 import dequantize_mxfp8, quantize_mxfp8
    from kernelhub.ops.quant.nvfp4 import dequantize_nvfp4, quantize_nvfp4

    return (
        attention,
        paged_attention,
        merge_attention_states,
        concat_mla_k,
        quantize_fp8,
        quantize_nvfp4,
        quantize_mxfp4,
        quantize_mxfp8,
        dequantize_fp8,
        dequantize_nvfp4,
        dequantize_mxfp4,
        dequantize_mxfp8,
        fp4_gemm,
    )
