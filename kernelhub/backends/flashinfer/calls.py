"""The calls that adapters make of FlashInfer. A record checks its calls against the library's source.

Where a release defines a function elsewhere, there are several calls, and the first that is defined is checked: so
`BatchDecodeWithPagedKVCacheWrapper.plan`, which takes any keyword from 0.6.15 on and passes them to `_plan_impl`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from kernelhub.probes.signature import Call

_TYPES = ("q_data_type", "kv_data_type", "o_data_type")
_SCORES = ("causal", "sm_scale", "window_left", "logits_soft_cap")
_RUN = ("out", "return_lse")

DECODE = Call(
    "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper.__init__",
    ("float_workspace_buffer",),
    ("kv_layout", "use_tensor_cores", "backend"),
)
_DECODE_PLAN = (
    ("indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim", "page_size"),
    (*_TYPES, *_SCORES[1:]),
)
DECODE_PLAN = tuple(
    Call(f"flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper.{method}", *_DECODE_PLAN)
    for method in ("_plan_impl", "plan")
)
DECODE_RUN = Call("flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper.run", ("q", "paged_kv_cache"), _RUN)

PREFILL = Call(
    "flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper.__init__",
    ("float_workspace_buffer",),
    ("kv_layout", "backend"),
)
PREFILL_PLAN = Call(
    "flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper.plan",
    ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"),
    ("num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size", "max_token_per_sequence", *_TYPES, *_SCORES),
)
PREFILL_RUN = Call("flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper.run", ("q", "paged_kv_cache"), _RUN)

RAGGED = Call(
    "flashinfer.prefill:BatchPrefillWithRaggedKVCacheWrapper.__init__",
    ("float_workspace_buffer",),
    ("kv_layout", "backend"),
)
RAGGED_PLAN = Call(
    "flashinfer.prefill:BatchPrefillWithRaggedKVCacheWrapper.plan",
    ("qo_indptr", "kv_indptr"),
    ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo", *_TYPES, *_SCORES),
)
RAGGED_RUN = Call("flashinfer.prefill:BatchPrefillWithRaggedKVCacheWrapper.run", ("q", "k", "v"), _RUN)

XQA = Call(
    "flashinfer.decode:xqa_batch_decode_with_kv_cache",
    ("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len"),
    ("bmm1_scale", "bmm2_scale", "window_left", "out", "sinks", "kv_layout", "q_len_per_req"),
)
TRTLLM_DECODE = Call(
    "flashinfer.decode:trtllm_batch_decode_with_kv_cache",
    ("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len"),
    ("bmm1_scale", "bmm2_scale", "window_left", "out", "sinks", "kv_layout", "backend", "q_len_per_req"),
)

TRTLLM_CONTEXT = Call(
    "flashinfer.prefill:trtllm_batch_context_with_kv_cache",
    (
        "query",
        "kv_cache",
        "workspace_buffer",
        "block_tables",
        "seq_lens",
        "max_q_len",
        "max_kv_len",
        "bmm1_scale",
        "bmm2_scale",
        "batch_size",
        "cum_seq_lens_q",
        "cum_seq_lens_kv",
    ),
    ("window_left", "out", "sinks", "kv_layout", "causal"),
)
TRTLLM_RAGGED = Call(
    "flashinfer.prefill:trtllm_ragged_attention_deepseek",
    (
        "query",
        "key",
        "value",
        "workspace_buffer",
        "seq_lens",
        "max_q_len",
        "max_kv_len",
        "bmm1_scale",
        "bmm2_scale",
        "o_sf_scale",
        "batch_size",
        "window_left",
        "cum_seq_lens_q",
        "cum_seq_lens_kv",
        "enable_pdl",
        "is_causal",
        "return_lse",
    ),
    ("out", "skip_all_rows_active_check"),
)

_CUDNN = ("q", "k_cache", "v_cache", "scale", "workspace_buffer")
CUDNN_DECODE = Call(
    "flashinfer.cudnn.decode:cudnn_batch_decode_with_kv_cache",
    _CUDNN,
    ("max_sequence_kv", "actual_seq_lens_kv", "block_tables", "out"),
)
_CUDNN_MANY = (
    "max_token_per_sequence",
    "max_sequence_kv",
    "actual_seq_lens_q",
    "actual_seq_lens_kv",
    "causal",
    "return_lse",
    "batch_offsets_q",
    "batch_offsets_o",
    "batch_offsets_stats",
    "out",
    "lse",
)
_CUDNN_PREFILL = "flashinfer.cudnn.prefill:cudnn_batch_prefill_with_kv_cache"
CUDNN_PREFILL = Call(_CUDNN_PREFILL, _CUDNN, (*_CUDNN_MANY, "block_tables"))
CUDNN_RAGGED = Call(_CUDNN_PREFILL, _CUDNN, (*_CUDNN_MANY, "batch_offsets_k", "batch_offsets_v"))

# A module until 0.6.9, then a package that passes on its `_core`.
SINKS = Call(
    "flashinfer.attention:BatchAttentionWithAttentionSinkWrapper.__init__",
    ("float_workspace_buffer",),
    ("kv_layout", "backend", "q_data_type", "kv_data_type", "head_dim_qk", "head_dim_vo", "window_left"),
)

_MLA = (("float_workspace_buffer",), ("backend",))
_MLA_PLAN = (
    (),
    (
        "qo_indptr",
        "kv_indptr",
        "kv_indices",
        "kv_len_arr",
        "num_heads",
        "head_dim_ckv",
        "head_dim_kpe",
        "page_size",
        "causal",
        "sm_scale",
        "q_data_type",
        "kv_data_type",
    ),
)
_MLA_RUN = ((), ("q_nope", "q_pe", "ckv_cache", "kpe_cache", *_RUN))
# A module until 0.6.7, then a package that passes on all of its `_core`.
MLA, MLA_PLAN, MLA_RUN = (
    tuple(
        Call(f"flashinfer.{module}:BatchMLAPagedAttentionWrapper.{method}", *given) for module in ("mla", "mla._core")
    )
    for method, given in (("__init__", _MLA), ("plan", _MLA_PLAN), ("run", _MLA_RUN))
)
_LATENT = (
    "query",
    "kv_cache",
    "workspace_buffer",
    "qk_nope_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "block_tables",
    "seq_lens",
    "max_seq_len",
)
_LATENT_MORE = ("out", "bmm1_scale", "bmm2_scale")
_BINARIES = ("sparse_mla_top_k", "backend", "return_lse")
TRTLLM_LATENT = tuple(
    Call(f"flashinfer.{module}:trtllm_batch_decode_with_kv_cache_mla", _LATENT, (*_LATENT_MORE, *_BINARIES))
    for module in ("mla", "mla._core")
)
XQA_LATENT = tuple(
    Call(f"flashinfer.{module}:xqa_batch_decode_with_kv_cache_mla", _LATENT, _LATENT_MORE)
    for module in ("mla", "mla._core")
)
# CUTLASS's, of which the inner functions are called: the wrapper of the one copies the whole cache, that of the other
# makes tables of a fixed size. They have no Python source. That of latents takes what it is given here in releases
# whose wrapper takes `o_scale`; that of tables is what `fmha_varlen_plan` calls, the same since 0.6.1.
CUTLASS_MODULE = Call(
    "flashinfer.prefill:get_fmha_module",
    (
        "dtype_q",
        "dtype_kv",
        "dtype_o",
        "dtype_idx",
        "head_dim_qk",
        "head_dim_vo",
        "pos_encoding_mode",
        "use_sliding_window",
        "use_logits_soft_cap",
        "device",
    ),
)
CUTLASS_RAGGED = Call(
    "flashinfer.prefill:fmha_varlen",
    ("q", "k", "v", "qo_segment_offsets", "kv_segment_offsets"),
    ("plan_info", "max_qo_len", "out", "lse", "causal", "sm_scale"),
)
CUTLASS_LATENT_MODULE = Call("flashinfer.mla._core:get_mla_module")
CUTLASS_LATENT = Call(
    "flashinfer.mla._core:BatchMLAPagedAttentionWrapper.run",
    (),
    ("q_nope", "q_pe", "ckv_cache", "kpe_cache", "o_scale"),
)
CONCAT = Call("flashinfer.concat_ops:concat_mla_k", ("k", "k_nope", "k_rope"))
MERGE_IN_PLACE = Call("flashinfer.cascade:merge_state_in_place", ("v", "s", "v_other", "s_other"))
MERGE_MANY = Call("flashinfer.cascade:merge_states", ("v", "s"))

_BASE = "flashinfer.gemm.gemm_base"
FP8_GEMM = Call(f"{_BASE}:fp8_gemm_sm100", ("a", "b", "scale_a", "scale_b", "out", "workspace_buffer", "runner_names"))
BLOCKS_HOPPER = Call(
    f"{_BASE}:fp8_blockscale_gemm_sm90", ("input", "weight", "input_scale", "weight_scale", "out", "out_dtype")
)
GROUPWISE = Call(
    f"{_BASE}:gemm_fp8_nt_groupwise",
    (
        "a",
        "b",
        "a_scale",
        "b_scale",
        "scale_major_mode",
        "mma_sm",
        "scale_granularity_mnk",
        "out",
        "out_dtype",
        "backend",
    ),
)

GROUPS = Call(
    f"{_BASE}:group_gemm_fp8_nt_groupwise",
    (
        "a",
        "b",
        "a_scale",
        "b_scale",
        "m_indptr",
        "scale_granularity_mnk",
        "scale_major_mode",
        "mma_sm",
        "out",
        "out_dtype",
    ),
)
_TILED = (("a", "b", "a_scale", "b_scale", "m_indptr"), ("out", "out_dtype"))
GROUPS_NVFP4 = Call(f"{_BASE}:group_gemm_nvfp4_nt_groupwise", _TILED[0], ("alpha", *_TILED[1]))
GROUPS_MXFP4 = Call(f"{_BASE}:group_gemm_mxfp8_mxfp4_nt_groupwise", *_TILED)
# Its tiles come from a scheduler that read past the last group, until it moved beside Rubin's.
MASKED_GROUPS = Call(
    "flashinfer.gemm.kernels.grouped_gemm_masked_wrapper:grouped_gemm_nt_masked",
    ("lhs", "rhs", "out", "masked_m"),
    ("ab_dtype", "sf_dtype", "c_dtype", "sf_vec_size", "alpha", "alpha_dtype"),
)
FP4_GEMM = Call(
    f"{_BASE}:mm_fp4",
    (
        "a",
        "b",
        "a_descale",
        "b_descale",
        "alpha",
        "out_dtype",
        "out",
        "block_size",
        "use_8x4_sf_layout",
        "backend",
        "use_nvfp4",
    ),
)
MX_GEMM = Call(
    f"{_BASE}:mm_mxfp8",
    ("a", "b", "a_descale", "b_descale", "out", "out_dtype", "use_8x4_sf_layout", "backend"),
)
EXPERTS = Call(
    "flashinfer.fused_moe.core:cutlass_fused_moe",
    (
        "input",
        "token_selected_experts",
        "token_final_scales",
        "fc1_expert_weights",
        "fc2_expert_weights",
        "output_dtype",
        "quant_scales",
    ),
    ("output", "use_fused_finalize"),
)
EXPERTS_SPACE = Call(
    "flashinfer.fused_moe.core:cutlass_fused_moe_workspace_size",
    ("max_num_tokens", "hidden_size", "intermediate_size", "num_experts_total", "top_k"),
    (
        "x_dtype",
        "weight_dtype",
        "output_dtype",
        "use_fused_finalize",
        "device",
    ),
)
# What loads a module, and the functions whose inner part the adapters call: it writes to a given destination.
SEGMENTS = Call(f"{_BASE}:get_gemm_sm90_module")
_QUANTIZATION = "flashinfer.quantization.fp4_quantization"
DEQUANTIZE_MODULE = Call(f"{_QUANTIZATION}:get_fp4_kv_dequantization_module")
DEQUANTIZE_NVFP4 = Call(
    f"{_QUANTIZATION}:nvfp4_kv_dequantize", ("fp4_data", "block_scales", "global_scale", "output_dtype")
)
QUANTIZE_MODULE = Call(f"{_QUANTIZATION}:get_fp4_kv_quantization_module")
QUANTIZE_NVFP4_KV = Call(f"{_QUANTIZATION}:nvfp4_kv_quantize", ("input", "global_scale"))
QUANTIZE_FP4 = Call(
    f"{_QUANTIZATION}:fp4_quantize",
    ("input", "global_scale", "sf_vec_size", "sf_use_ue8m0", "is_sf_swizzled_layout"),
    ("is_global_scale_inversed", "backend"),
)
QUANTIZE_MXFP8 = Call(
    "flashinfer.quantization.fp8_quantization:mxfp8_quantize", ("input", "is_sf_swizzled_layout"), ("backend",)
)
QUANTIZE_GROUPS = Call(
    "flashinfer.quantization.fp8_quantization:per_token_group_quant_8bit",
    ("x", "group_size", "eps", "dst_dtype", "column_major_scales", "scale_tma_aligned", "scale_ue8m0", "backend"),
)
_SIZES = (
    "num_experts",
    "top_k",
    "n_group",
    "topk_group",
    "intermediate_size",
    "local_expert_offset",
    "local_num_experts",
    "routed_scaling_factor",
)
# Where it is, entry points for a routing that was made elsewhere take ids and weights apart, the weights in float32.
CHOICES = Call("flashinfer.fused_moe.core:_split_precomputed_routing", ("topk_ids",))
TRTLLM_BF16 = Call(
    "flashinfer.fused_moe.core:trtllm_bf16_routed_moe",
    (
        "topk_ids",
        "hidden_states",
        "gemm1_weights",
        "gemm2_weights",
        *_SIZES,
        "routing_method_type",
        "use_shuffled_weight",
        "weight_layout",
    ),
    ("output",),
)
TRTLLM_FP8 = Call(
    "flashinfer.fused_moe.core:trtllm_fp8_per_tensor_scale_routed_moe",
    (
        "topk_ids",
        "routing_bias",
        "hidden_states",
        "gemm1_weights",
        "output1_scales_scalar",
        "output1_scales_gate_scalar",
        "gemm2_weights",
        "output2_scales_scalar",
        *_SIZES,
        "use_routing_scales_on_input",
        "routing_method_type",
    ),
    ("output",),
)
TRTLLM_FP8_BLOCKS = Call(
    "flashinfer.fused_moe.core:trtllm_fp8_block_scale_routed_moe",
    (
        "topk_ids",
        "routing_bias",
        "hidden_states",
        "hidden_states_scale",
        "gemm1_weights",
        "gemm1_weights_scale",
        "gemm2_weights",
        "gemm2_weights_scale",
        *_SIZES,
        "routing_method_type",
        "use_shuffled_weight",
        "weight_layout",
    ),
    ("output", "fp8_quantization_type"),
)
TRTLLM_FP4 = Call(
    "flashinfer.fused_moe.core:trtllm_fp4_block_scale_routed_moe",
    (
        "topk_ids",
        "routing_bias",
        "hidden_states",
        "hidden_states_scale",
        "gemm1_weights",
        "gemm1_weights_scale",
        "gemm1_bias",
        "gemm1_alpha",
        "gemm1_beta",
        "gemm1_clamp_limit",
        "gemm2_weights",
        "gemm2_weights_scale",
        "gemm2_bias",
        "output1_scale_scalar",
        "output1_scale_gate_scalar",
        "output2_scale_scalar",
        *_SIZES,
        "routing_method_type",
    ),
    ("output",),
)
TRTLLM_MXINT4 = Call(
    "flashinfer.fused_moe.core:trtllm_mxint4_block_scale_routed_moe",
    (
        "topk_ids",
        "hidden_states",
        "gemm1_weights",
        "gemm1_weights_scale",
        "gemm1_alpha",
        "gemm1_beta",
        "gemm1_clamp_limit",
        "gemm2_weights",
        "gemm2_weights_scale",
        *_SIZES,
        "routing_method_type",
    ),
    ("output",),
)
EXPERTS_FP4 = Call(
    EXPERTS.target,
    EXPERTS.positional,
    (
        *EXPERTS.keywords,
        "fc1_expert_biases",
        "fc2_expert_biases",
        "swiglu_alpha",
        "swiglu_beta",
        "swiglu_limit",
        "use_w4_group_scaling",
    ),
)
_CODES = (*EXPERTS.keywords, "input_sf", "swizzled_input_sf")  # of tokens that are quantised before
EXPERTS_CODES = Call(EXPERTS.target, EXPERTS.positional, _CODES)
EXPERTS_MXFP8 = Call(
    EXPERTS.target,
    EXPERTS.positional,
    (
        *_CODES,
        "fc1_expert_biases",
        "fc2_expert_biases",
        "swiglu_alpha",
        "swiglu_beta",
        "swiglu_limit",
        "use_mxfp8_act_scaling",
    ),
)
EXPERTS_MXFP8_SPACE = Call(
    EXPERTS_SPACE.target, EXPERTS_SPACE.positional, (*EXPERTS_SPACE.keywords, "use_mxfp8_act_scaling")
)
EXPERTS_BLOCKS = Call(EXPERTS.target, EXPERTS.positional, (*EXPERTS.keywords, "use_deepseek_fp8_block_scale"))
EXPERTS_BLOCKS_SPACE = Call(
    EXPERTS_SPACE.target, EXPERTS_SPACE.positional, (*EXPERTS_SPACE.keywords, "use_deepseek_fp8_block_scale")
)
EXPERTS_FP4_SPACE = Call(
    EXPERTS_SPACE.target, EXPERTS_SPACE.positional, (*EXPERTS_SPACE.keywords, "use_w4_group_scaling")
)

_EXCHANGE = "flashinfer.comm.trtllm_moe_alltoall"
_EXCHANGED = ("workspace", "metainfo", "runtime_max_tokens_per_rank", "ep_rank", "ep_size", "top_k")
EXCHANGE_MODULE = Call(f"{_EXCHANGE}:get_moe_alltoall_module")
EXCHANGE_INITIALIZE = Call(
    f"{_EXCHANGE}:moe_a2a_initialize", keywords=("workspace", "ep_rank", "ep_size", "max_num_tokens")
)
# `enable_pdl` marks the releases whose combine adds in float32; those before add in the dtype of the rows.
EXCHANGE_DISPATCH = Call(
    f"{_EXCHANGE}:moe_a2a_dispatch",
    keywords=("token_selected_experts", "input_payloads", *_EXCHANGED, "num_experts", "enable_pdl"),
)
EXCHANGE_COMBINE = Call(
    f"{_EXCHANGE}:moe_a2a_combine",
    keywords=(
        "payload",
        "local_num_tokens",
        *_EXCHANGED,
        "combine_payload_offset",
        "payload_in_workspace",
        "output",
        "enable_pdl",
    ),
)
PACK_STRIDED = Call(
    "flashinfer.comm.dlpack_utils:pack_strided_memory",
    ("ptr", "segment_size", "segment_stride", "num_segments", "dtype", "dev_id"),
)
# Not in the first release that is admitted: `mm_mxfp8`, `nvfp4_kv_dequantize`, masks of the context and an LSE of
# latent attention, which marks the release that takes `out` as documented, and a package of quantisers, from
# 0.6.12; sums in a fixed
# order, a function that returns the workspace, a routing in float32, no look at the lengths of ragged sequences, and
# exchanges of tokens that add in float32 from 0.6.18 on, of those that were read.
NEWER: tuple[Call | tuple[Call, ...], ...] = (
    EXPERTS,
    EXPERTS_SPACE,
    EXPERTS_FP4,
    EXPERTS_FP4_SPACE,
    CHOICES,
    TRTLLM_BF16,
    TRTLLM_FP8,
    TRTLLM_FP8_BLOCKS,
    TRTLLM_MXINT4,
    EXPERTS_BLOCKS,
    EXPERTS_BLOCKS_SPACE,
    EXPERTS_CODES,
    EXPERTS_MXFP8,
    EXPERTS_MXFP8_SPACE,
    MX_GEMM,
    GROUPS_NVFP4,
    MASKED_GROUPS,
    TRTLLM_CONTEXT,
    TRTLLM_RAGGED,
    TRTLLM_LATENT,
    CUTLASS_LATENT_MODULE,
    CUTLASS_LATENT,
    DEQUANTIZE_MODULE,
    DEQUANTIZE_NVFP4,
    QUANTIZE_MODULE,
    QUANTIZE_NVFP4_KV,
    QUANTIZE_FP4,
    QUANTIZE_MXFP8,
    QUANTIZE_GROUPS,
    EXCHANGE_DISPATCH,
    EXCHANGE_COMBINE,
)

# Which of them a call gives depends on the pattern; the others are None.
ALL_REDUCE_OPERANDS = (
    "allreduce_out",
    "residual_in",
    "residual_out",
    "norm_out",
    "quant_out",
    "scale_out",
    "rms_gamma",
    "rms_eps",
    "scale_factor",
    "layout_code",
)
ALL_REDUCE = Call(
    "flashinfer.comm.trtllm_ar:trtllm_allreduce_fusion",
    keywords=(
        "allreduce_in",
        "world_size",
        "world_rank",
        "token_num",
        "hidden_dim",
        "workspace_ptrs",
        "launch_with_pdl",
        "trigger_completion_at_end",
        "fp32_acc",
        "pattern_code",
        "use_oneshot",
        *ALL_REDUCE_OPERANDS,
    ),
)

CALLS: tuple[Call | tuple[Call, ...], ...] = (
    DECODE,
    DECODE_PLAN,
    DECODE_RUN,
    PREFILL,
    PREFILL_PLAN,
    PREFILL_RUN,
    RAGGED,
    RAGGED_PLAN,
    RAGGED_RUN,
    XQA,
    TRTLLM_DECODE,
    CUDNN_DECODE,
    CUDNN_PREFILL,
    CUDNN_RAGGED,
    MLA,
    MLA_PLAN,
    MLA_RUN,
    CUTLASS_MODULE,
    CUTLASS_RAGGED,
    SINKS,
    XQA_LATENT,
    CONCAT,
    MERGE_IN_PLACE,
    MERGE_MANY,
    FP8_GEMM,
    BLOCKS_HOPPER,
    GROUPWISE,
    FP4_GEMM,
    GROUPS,
    GROUPS_MXFP4,
    SEGMENTS,
    TRTLLM_FP4,
    ALL_REDUCE,
    EXCHANGE_MODULE,
    EXCHANGE_INITIALIZE,
    PACK_STRIDED,
)


def taking(function: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """The function, if its parameters are those.

    Raises:
        ImportError: they are others, so that another kernel is taken, with this as the reason.
    """
    found = tuple(inspect.signature(function).parameters)
    if found != names:
        raise ImportError(f"FlashInfer's {function.__name__} takes ({', '.join(found)}), not ({', '.join(names)})")
    return function
