"""The libraries of vLLM's builds of FlashAttention, and what adapters pass to their operators.

Schemas are those of vLLM 0.33.0 (its wheel).
"""

from __future__ import annotations

from kernelhub.probes.package import Library

VLLM_INSTALL = 'pip install "vllm>=0.33"'
FA2 = Library("vllm", "_vllm_fa2_C", VLLM_INSTALL, ("vllm_flash_attn/_vllm_fa2_C*.so",))
FA3 = Library("vllm", "_vllm_fa3_C", VLLM_INSTALL, ("vllm_flash_attn/_vllm_fa3_C*.so",))

FA3_FORWARD = (
    "(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, "
    "int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap, "
    "bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, "
    "Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
)
FA2_VARLEN = (
    "(Tensor! q, Tensor k, Tensor v, Tensor!? out, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_k, "
    "Tensor? leftpad_k, Tensor? block_table, Tensor? alibi_slopes, int max_seqlen_q, int max_seqlen_k, "
    "float p_dropout, float softmax_scale, bool zero_tensors, bool is_causal, int window_size_left, "
    "int window_size_right, float softcap, bool return_softmax, int num_splits, Tensor? gen) -> Tensor[]"
)
