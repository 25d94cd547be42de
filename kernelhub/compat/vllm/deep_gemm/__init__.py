"""The names of ``vllm.utils.deep_gemm``, with the same meaning, based on kernelhub's probes.

- `support`: whether DeepGEMM is installed and runs on this device, and the format of its scales
- `calls`: its functions, from the installed package or the copy in vLLM's wheel, imported at their first call
- `grouped`: its alignment of grouped products, which is a setting of the whole process
- `indexer`: logits of sparse attention's indexer
- `casts`: blocks of float8 and a similarity measure, in plain torch

The names are those of vLLM 0.33. Every query has ``.why()``; none imports DeepGEMM.
"""

from kernelhub.compat.vllm.deep_gemm.calls import (
    bf16_mega_gate,
    cublaslt_gemm_nt,
    fp8_einsum,
    fp8_gemm_nt,
    fp8_m_grouped_gemm_nt_masked,
    get_col_major_tma_aligned_tensor,
    get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor,
    get_mn_major_tma_aligned_packed_ue8m0_tensor,
    get_num_sms,
    m_grouped_fp8_fp4_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_contiguous,
    mega_mhc,
    pack_ue8m0_to_int,
    set_num_sms,
    tf32_hc_prenorm_gemm,
    transform_sf_into_required_layout,
)
from kernelhub.compat.vllm.deep_gemm.casts import (
    DEFAULT_BLOCK_SIZE,
    calc_diff,
    get_tma_aligned_size,
    per_block_cast_to_fp8,
)
from kernelhub.compat.vllm.deep_gemm.grouped import (
    get_mk_alignment_for_contiguous_layout,
    get_theoretical_mk_alignment_for_contiguous_layout,
    mk_alignment_scope,
    set_mk_alignment_for_contiguous_layout,
)
from kernelhub.compat.vllm.deep_gemm.indexer import (
    fp8_fp4_mqa_logits,
    fp8_fp4_paged_mqa_logits,
    fp8_fp4_paged_sparse_mqa_logits,
    fp8_fp4_sparse_mqa_logits,
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    get_paged_mqa_logits_metadata,
    get_paged_mqa_page_sizes,
    get_paged_sparse_mqa_logits_metadata,
    get_sparse_mqa_logits_metadata,
    has_deep_gemm_sparse_mqa,
    mqa_logits_mx_inputs,
    mqa_logits_use_mx_scales,
    native_next_n_supported,
)
from kernelhub.compat.vllm.deep_gemm.support import (
    DeepGemmQuantScaleFMT,
    has_deep_gemm,
    is_deep_gemm_e8m0_used,
    is_deep_gemm_supported,
    should_auto_disable_deep_gemm,
    should_use_deepgemm_for_fp8_linear,
)

__all__ = [
    "DEFAULT_BLOCK_SIZE",
    "DeepGemmQuantScaleFMT",
    "bf16_mega_gate",
    "calc_diff",
    "cublaslt_gemm_nt",
    "fp8_einsum",
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_fp4_paged_sparse_mqa_logits",
    "fp8_fp4_sparse_mqa_logits",
    "fp8_gemm_nt",
    "fp8_m_grouped_gemm_nt_masked",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_col_major_tma_aligned_tensor",
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_mk_alignment_for_contiguous_layout",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_num_sms",
    "get_paged_mqa_logits_metadata",
    "get_paged_mqa_page_sizes",
    "get_paged_sparse_mqa_logits_metadata",
    "get_sparse_mqa_logits_metadata",
    "get_theoretical_mk_alignment_for_contiguous_layout",
    "get_tma_aligned_size",
    "has_deep_gemm",
    "has_deep_gemm_sparse_mqa",
    "is_deep_gemm_e8m0_used",
    "is_deep_gemm_supported",
    "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_contiguous",
    "mega_mhc",
    "mk_alignment_scope",
    "mqa_logits_mx_inputs",
    "mqa_logits_use_mx_scales",
    "native_next_n_supported",
    "pack_ue8m0_to_int",
    "per_block_cast_to_fp8",
    "set_mk_alignment_for_contiguous_layout",
    "set_num_sms",
    "should_auto_disable_deep_gemm",
    "should_use_deepgemm_for_fp8_linear",
    "tf32_hc_prenorm_gemm",
    "transform_sf_into_required_layout",
]
