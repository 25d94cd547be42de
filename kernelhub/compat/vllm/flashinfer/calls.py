"""FlashInfer's functions under vLLM's names, imported at their first call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from kernelhub.compat.vllm.flashinfer.presence import has_flashinfer
from kernelhub.compat.vllm.library import Lazy, load
from kernelhub.errors import KernelUnavailable


def _lazy(target: str, fallback: Callable[..., Any] | None = None) -> Lazy:
    return Lazy(f"flashinfer{target}", has_flashinfer.why, fallback)


flashinfer_trtllm_bf16_moe = _lazy(".fused_moe:trtllm_bf16_moe")
flashinfer_trtllm_fp8_block_scale_moe = _lazy(".fused_moe:trtllm_fp8_block_scale_moe")
flashinfer_trtllm_fp8_per_tensor_scale_moe = _lazy(".fused_moe:trtllm_fp8_per_tensor_scale_moe")
flashinfer_cutlass_fused_moe = _lazy(".fused_moe:cutlass_fused_moe")
flashinfer_b12x_fused_moe = _lazy(".fused_moe:b12x_fused_moe")
flashinfer_get_hybrid_num_tokens_buckets = _lazy(".fused_moe.utils:get_hybrid_num_tokens_buckets")
flashinfer_cutedsl_grouped_gemm_nt_masked = _lazy(".cute_dsl.blockscaled_gemm:grouped_gemm_nt_masked")
flashinfer_convert_sf_to_mma_layout = _lazy(".cute_dsl.utils:convert_sf_to_mma_layout")
flashinfer_prepare_bf16_fp4_weights = _lazy(".gemm:prepare_bf16_fp4_weights")
flashinfer_fp8_blockscale_gemm = _lazy(".gemm:fp8_blockscale_gemm_sm90")
flashinfer_fp4_quantize = _lazy(":fp4_quantize")
fp4_quantize = flashinfer_fp4_quantize  # its name up to vLLM 0.11
nvfp4_batched_quantize = _lazy(":nvfp4_batched_quantize")
silu_and_mul_scaled_nvfp4_experts_quantize = _lazy(":silu_and_mul_scaled_nvfp4_experts_quantize")
scaled_fp4_grouped_quantize = _lazy(":scaled_fp4_grouped_quantize")
nvfp4_block_scale_interleave = _lazy(".fp4_quantization:block_scale_interleave")
flashinfer_cute_dsl_fused_moe_nvfp4 = _lazy(":cute_dsl_fused_moe_nvfp4")
trtllm_fp4_block_scale_moe = _lazy(":trtllm_fp4_block_scale_moe")
flashinfer_trtllm_batch_decode_with_kv_cache_mla = _lazy(".decode:trtllm_batch_decode_with_kv_cache_mla")
flashinfer_trtllm_batch_decode_sparse_mla_dsv4 = _lazy(".decode:trtllm_batch_decode_sparse_mla_dsv4")
flashinfer_xqa_batch_decode_with_kv_cache = _lazy(".decode:xqa_batch_decode_with_kv_cache")
flashinfer_packed_fused_kda_decode = _lazy(":packed_fused_kda_decode")
flashinfer_recurrent_kda = _lazy(".kda:recurrent_kda")
flashinfer_fused_kda_decode = _lazy(".kda_decode:fused_kda_decode")

# Without FlashInfer there is nothing to tune, and the context manager has no effect.
autotune = _lazy(".autotuner:autotune", fallback=lambda *args, **kwargs: contextlib.nullcontext())

# Called by `operators` only.
mm_bf16 = _lazy(":mm_bf16")
mm_fp4 = _lazy(":mm_fp4")
mm_bf16_fp4 = _lazy(".gemm:mm_bf16_fp4")
mxfp4_quantize = _lazy(":mxfp4_quantize")
bmm_fp8 = _lazy(":bmm_fp8")
nvfp4_quantize = _lazy(":nvfp4_quantize")
mxfp8_quantize = _lazy(":mxfp8_quantize")
mm_mxfp8 = _lazy(":mm_mxfp8")


def scale_layout_8x4() -> Any:
    """FlashInfer's name for scales in tiles of 8 x 4."""
    return load("flashinfer:SfLayout", has_flashinfer.why).layout_8x4


def sparse_mla_sizes() -> Any:
    """Heads and numbers of tokens that FlashInfer's sparse decode is compiled for; empty if unknown."""
    try:
        return load("flashinfer.mla._sparse_mla_sm120:_DECODE_DSV4_DISPATCH", has_flashinfer.why)
    except KernelUnavailable:
        return ()


def pin_host_range_buf(length: int) -> None:
    """Pin the host tensor 0, 1, 2, ... that FlashInfer copies to the GPU in each decode plan, so that no copy blocks.

    FlashInfer keeps the tensor unpinned in its own cache; in a release without this cache the call has no effect.
    """
    if not torch.cuda.is_available():
        return
    try:
        module = load("flashinfer:utils", has_flashinfer.why)
        make, cache, rounded = module._get_range_buf, module._cache_buf, module._ceil_pow2(length)
    except (KernelUnavailable, AttributeError):
        return
    make(length, "cpu")
    key = (f"range_{rounded}", "cpu")
    if key in cache and not cache[key].is_pinned():
        cache[key] = cache[key].pin_memory()
