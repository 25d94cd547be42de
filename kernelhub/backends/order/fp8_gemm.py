"""Order of the kernels of `fp8_gemm`."""

from kernelhub.dispatch.order import Line

_TRITON = "triton.fp8_gemm"
_LAST = "torch.dequantized"
_DEEP = "deep_gemm.fp8_blocks"
# Not run yet: for sm_10x, of which none was at hand, FlashInfer's, in the order that its own policy has them, and
# CUTLASS's in vLLM's and SGLang's libraries.
_NOT_RUN = (
    "deep_gemm.fp8_blocks_ue8m0",
    *(f"flashinfer.{name}" for name in ("fp8_blocks", "groupwise_trtllm", "groupwise_cutlass")),
    "cutlass.vllm_blockwise",
    "cutlass.sgl_fp8_blockwise",
)
_ROW_NOT_RUN = ("cutlass.vllm_scaled_mm", "cutlass.sgl_fp8_scaled_mm")
_TENSOR_NOT_RUN = (*_ROW_NOT_RUN, *(f"flashinfer.fp8_{name}" for name in ("cutlass", "cublas", "cudnn")))
_H200 = "measured on an H200, the only GPU so far (benchmarks/results/gemm_h200.json)"

LINES = (
    # 4096 x 4096 weights in blocks, 1, 16 and 256 rows, on two cores: 0.58, 1.51, 12.6 ms; dequantized 5.2, 9.3, 50.
    Line("cpu", "*", ("cpp.fp8_gemm", _LAST, _TRITON), "measured on an EPYC of Zen 5, torch 2.13, 2026-11-20"),
    # 1, 64, 256 and 4096 rows with 8192 x 8192: 0.030, 0.035, 0.037, 0.427 ms; ours 0.031, 0.035, 0.050, 0.580.
    Line("*", "tensor", ("torch.scaled_mm", _TRITON, *_TENSOR_NOT_RUN, _LAST), _H200),
    # Six shapes, 1 to 64 rows: ours took 0.53 to 0.93 of torch's time, with 8192 x 8192 0.031 and 0.034 ms against
    # 0.048 and 0.040. From 96 rows on torch's is faster but for the smallest: 0.035 against 0.038, 4096 rows 0.448
    # against 0.586.
    Line("*", "row_decode", (_TRITON, "torch.scaled_mm_rowwise", *_ROW_NOT_RUN, _LAST), _H200),
    Line("*", "row_prefill", ("torch.scaled_mm_rowwise", _TRITON, *_ROW_NOT_RUN, _LAST), _H200),
    # 1, 16 and 64 rows, ours, DeepGEMM's and torch's (tokenspeed-deepgemm 2.5.0, torch 2.11): with 7168 x 2304 0.0149,
    # 0.0151, 0.0177 ms, 0.0143, 0.0145, 0.0147 and 0.031, 0.020, 0.021; with 24576 x 1536 0.021, 0.019, 0.020, 0.023,
    # 0.024, 0.025; with 7168 x 18432 0.048, 0.048, 0.064, 0.050, 0.049, 0.052; with 576 x 7168 ours 0.8 of DeepGEMM's.
    Line("*", "block_decode", (_TRITON, _DEEP, "torch.scaled_mm_blockwise", *_NOT_RUN, _LAST), _H200),
    # 128, 1024 and 4096 rows: with 7168 x 18432 DeepGEMM's 0.055, 0.228, 0.752 ms, torch's 0.066, 0.230, 0.849, ours
    # 0.075, 0.373, 1.39; with 24576 x 1536 0.024, 0.070, 0.240, 0.026, 0.081, 0.272, 0.030, 0.124, 0.456; only with
    # 576 x 7168 and 128 rows ours is the fastest, 0.015.
    Line("*", "block_prefill", (_DEEP, "torch.scaled_mm_blockwise", _TRITON, *_NOT_RUN, _LAST), _H200),
    Line("*", "mx", (_TRITON, "flashinfer.mx_cutlass", "flashinfer.mx_cudnn", _LAST), _H200),
)
