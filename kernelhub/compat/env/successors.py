"""Names that kernelhub does not obey, with what stands in their place.

vLLM's were read from its releases 0.11.1, 0.14.0 and 0.33.0 (2026-11-01): those here are in one of the first two and
not in the last.
"""

from __future__ import annotations

from kernelhub.compat.env.variable import DEEP_GEMM, FLASHINFER, VLLM

# name -> (owner, what to write in its place)
SUCCESSORS = {
    "VLLM_ALL2ALL_BACKEND": (VLLM, "--all2all-backend"),
    "VLLM_FLASHINFER_DISABLE_Q_QUANTIZATION": (VLLM, "--attention-config.disable_flashinfer_q_quantization"),
    "VLLM_FLASH_ATTN_MAX_NUM_SPLITS_FOR_CUDA_GRAPH": (
        VLLM,
        "--attention-config.flash_attn_max_num_splits_for_cuda_graph",
    ),
    "VLLM_MXFP4_USE_MARLIN": (VLLM, "--moe-backend marlin"),
    "VLLM_TEST_FORCE_FP8_MARLIN": (VLLM, "--linear-backend marlin"),
    "VLLM_USE_FBGEMM": (VLLM, "--linear-backend"),
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8": (VLLM, "--moe-backend flashinfer_trtllm"),
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS": (VLLM, "--moe-backend flashinfer_cutlass"),
    "VLLM_USE_NVFP4_CT_EMULATIONS": (VLLM, "--linear-backend emulation"),
    "VLLM_V1_USE_PREFILL_DECODE_ATTENTION": (VLLM, "--attention-backend ROCM_ATTN"),
    "FLASHINFER_CACHE_DIR": (FLASHINFER, "FLASHINFER_WORKSPACE_BASE, the folder above .cache/flashinfer"),
    "DG_CACHE_DIR": (DEEP_GEMM, "DG_JIT_CACHE_DIR"),
    "DG_NVCC_COMPILER": (DEEP_GEMM, "DG_JIT_NVCC_COMPILER"),
    "DG_PTXAS_VERBOSE": (DEEP_GEMM, "DG_JIT_PTXAS_VERBOSE"),
    "DG_JIT_PRINT_NVCC_COMMAND": (DEEP_GEMM, "DG_JIT_PRINT_COMPILER_COMMAND"),
    "DG_PRINT_AUTOTUNE": (DEEP_GEMM, "DG_PRINT_CONFIGS"),
}

# vLLM's present names that look like a misspelling of one that chooses kernels, and choose none of kernelhub's.
LOOK_ALIKES = frozenset(
    {"VLLM_FLASHINFER_ALLREDUCE_BACKEND", "VLLM_USE_FLASHINFER_MOE_INT4", "VLLM_USE_FLASHINFER_SAMPLER"}
)
