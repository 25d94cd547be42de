"""Order of the kernels of float8 products."""

from kernelhub.dispatch.order import Line, first

_TRITON = "triton.fp8_gemm"
_LAST = "torch.dequantized"
_DEEP = "deep_gemm.fp8_blocks"
_GLUON = "gluon.fp8_gemm"
_CUDA = "cuda.fp8_gemm"
# TensorRT-LLM's form of DeepGEMM. It runs nvcc for other numbers of rows, while serving: fast, but opt-in.
_FLASHINFER = "flashinfer.fp8_blocks"
_VLLM_BLOCKS, _VLLM = "cutlass.vllm_blockwise", "cutlass.vllm_scaled_mm"
# For Blackwell, and CUTLASS's in versions of SGLang's library that no torch here loads.
_NOT_RUN = (
    "deep_gemm.fp8_blocks_ue8m0",
    *(f"flashinfer.{name}" for name in ("groupwise_trtllm", "groupwise_cutlass")),
    "cutlass.sgl_fp8_blockwise",
)
_SGL = ("cutlass.sgl_fp8_scaled_mm",)  # its result is copied (benchmarks/results/sgl_kernel_h200.json)
_TENSOR_NOT_RUN = (*_SGL, *(f"flashinfer.fp8_{name}" for name in ("cutlass", "cudnn")))
_H200 = "measured on an H200, the only GPU so far (benchmarks/results/gemm_h200.json)"
_H100 = f"{_H200}; Gluon's on an H100 (benchmarks/results/gluon_gemm_h100.json)"
_CUDA_FEW = (
    "measured on an H200 (benchmarks/results/cuda_gemm_few_rows_h200.json); torch's and vLLM's in gemm_h200.json"
)
_CUDA_ONE = "measured on an H200 (benchmarks/results/cuda_gemm_h200.json); torch's and vLLM's before (gemm_h200.json)"
_TENSOR = ("torch.scaled_mm", _TRITON, _VLLM, "flashinfer.fp8_cublas", *_TENSOR_NOT_RUN, _LAST)
_ROW_DECODE = (_TRITON, "torch.scaled_mm_rowwise", _VLLM, *_SGL, _LAST)
_ROW_PREFILL = ("torch.scaled_mm_rowwise", _TRITON, _VLLM, *_SGL, _LAST)
_BLOCK_DECODE = (_TRITON, _DEEP, "torch.scaled_mm_blockwise", _VLLM_BLOCKS, _FLASHINFER, *_NOT_RUN, _LAST)
_BLOCK_PREFILL = (_DEEP, "torch.scaled_mm_blockwise", _VLLM_BLOCKS, _TRITON, _FLASHINFER, *_NOT_RUN, _LAST)
_BLOCK_FEW = tuple((regime, _BLOCK_DECODE) for regime in ("block_decode", "block_batch", "block_long_batch"))
_BLOCK = (*_BLOCK_FEW, ("block_prefill", _BLOCK_PREFILL))
_WEIGHT_ONLY = (_TRITON, "marlin.fp8_bfloat16", "marlin.fp8_float16", _LAST)
_VLLM_SAYS = "https://github.com/vllm-project/vllm/tree/v0.33.0/vllm/model_executor/kernels/linear"

FP8_GEMM = (
    # 4096 x 4096 weights in blocks, 1, 16 and 256 rows, on two cores: 0.58, 1.51, 12.6 ms; dequantized 5.2, 9.3, 50.
    Line("cpu", "*", ("cpp.fp8_gemm", _LAST, _TRITON), "measured on an EPYC of Zen 5, torch 2.13, 2026-11-20"),
    # vLLM 0.33.0's CUTLASS, which is exact enough up to K 2048 there, ours and torch's: by row, 1, 64, 1024 and 4096
    # rows with 8192 x 2048 0.012, 0.012, 0.030, 0.098 ms, 0.014, 0.016, 0.042, 0.154 and 0.015, 0.014, 0.033, 0.116; by
    # tensor 0.012, 0.012, 0.029, 0.097 against torch's 0.012, 0.013, 0.033, 0.108. flashinfer.fp8_cublas is cuBLASLt,
    # as torch's is: with 8192 x 512 0.014, 0.011, 0.017, 0.040 and torch's 0.008, 0.008, 0.017, 0.044.
    Line(
        "hopper", "tensor", (_VLLM, "torch.scaled_mm", _TRITON, "flashinfer.fp8_cublas", *_TENSOR_NOT_RUN, _LAST), _H200
    ),
    Line("hopper", "row_decode", (_VLLM, _TRITON, "torch.scaled_mm_rowwise", *_SGL, _LAST), _H200),
    # Gluon's on an H100: 4096 and 1024 rows with 8192 x 8192 0.396 and 0.126 ms, torch's 0.445 and 0.119,
    # Triton's 0.564 and 0.146; 4096 with 7168 x 2304 0.116, 0.119 and 0.157. In graphs with a warm cache
    # (gluon_h100.json) 4096, 1024 and 256 rows with 8192 x 8192 0.429, 0.119 and 0.036, torch's 0.403, 0.105 and 0.032.
    Line("hopper", "row_prefill", (_VLLM, "torch.scaled_mm_rowwise", _GLUON, _TRITON, *_SGL, _LAST), _H100),
    # 1, 64, 256 and 4096 rows with 8192 x 8192: 0.030, 0.035, 0.037, 0.427 ms; ours 0.031, 0.035, 0.050, 0.580.
    Line("*", "tensor", _TENSOR, _H200),
    Line(
        "blackwell",
        "tensor",
        first(("flashinfer.fp8_cutlass", _VLLM), _TENSOR),
        f"vLLM tries FlashInfer, its own CUTLASS and torch ({_VLLM_SAYS}); FlashInfer's cuBLASLt is torch's",
        expected=True,
    ),
    *(
        Line(
            family,
            "tensor",
            first((_VLLM,), _TENSOR),
            f"vLLM tries its CUTLASS before torch ({_VLLM_SAYS}), as is right on an H200",
            expected=True,
        )
        for family in ("ada", "blackwell_rtx")
    ),
    *(
        Line(
            family,
            regime,
            first((_VLLM, "cutlass.sgl_fp8_scaled_mm"), others),
            f"vLLM's CUTLASS is first of its kernels by row ({_VLLM_SAYS}), as it is on an H200",
            expected=True,
        )
        for family in ("ada", "blackwell", "blackwell_rtx")
        for regime, others in (("row_decode", _ROW_DECODE), ("row_prefill", _ROW_PREFILL))
    ),
    # Six shapes, 1 to 64 rows: ours took 0.53 to 0.93 of torch's time, with 8192 x 8192 0.031 and 0.034 ms against
    # 0.048 and 0.040. From 96 rows on torch's is faster but for the smallest: 0.035 against 0.038, 4096 rows 0.448
    # against 0.586.
    Line("*", "row_decode", _ROW_DECODE, _H200),
    Line("*", "row_prefill", _ROW_PREFILL, _H200),
    # 1, 16 and 64 rows, ours, DeepGEMM's and torch's (tokenspeed-deepgemm 2.5.0, torch 2.11): with 7168 x 2304 0.0149,
    # 0.0151, 0.0177 ms, 0.0143, 0.0145, 0.0147 and 0.031, 0.020, 0.021; with 24576 x 1536 0.021, 0.019, 0.020, 0.023,
    # 0.024, 0.025; with 7168 x 18432 0.048, 0.048, 0.064, 0.050, 0.049, 0.052; with 576 x 7168 ours 0.8 of DeepGEMM's.
    # FlashInfer's: 0.016, 0.014, 0.016; 0.023, 0.021, 0.023; 0.051, 0.049, 0.050. vLLM's: 0.026, 0.018, 0.017; 0.033,
    # 0.027, 0.026; 0.079, 0.068, 0.065.
    *(Line("*", regime, kernels, _H200) for regime, kernels in _BLOCK_FEW),
    # One run ("beside"), 1, 8 and 16 rows, cuda.fp8_gemm, DeepGEMM's and Triton's: with 7168 x 18432 0.050, 0.041,
    # 0.040, 0.044, 0.039, 0.039 and 0.037, 0.046, 0.046; with 2112 x 7168 0.0107, 0.0089, 0.0083, 0.0149, 0.0103,
    # 0.0103 and 0.0084, 0.0078, 0.0079; with 36864 x 7168 0.086, 0.084, 0.077, 0.069, 0.068, 0.068 and 0.086, 0.076,
    # 0.067: mixed, so Triton's stays first.
    # There with 32, 48 and 64 rows: with 7168 x 2304 0.0087, 0.0072, 0.0072, 0.0063, 0.0070, 0.0059 and 0.0099,
    # 0.0134, 0.0111; with 7168 x 2048 0.0070, 0.0069, 0.0067, 0.0060, 0.0063, 0.0055 and 0.0093, 0.0128, 0.0104.
    Line("hopper", "block_batch", first((_DEEP, _CUDA), _BLOCK_DECODE), _CUDA_FEW),
    # With 7168 x 18432 0.0378, 0.0374, 0.0381, 0.0397, 0.0395, 0.0391 and 0.0486, 0.0518, 0.0527; with 2112 x 7168
    # 0.0082, 0.0081, 0.0081, 0.0103, 0.0104, 0.0093 and 0.0101, 0.0120, 0.0112; with 4096 x 7168 0.0131, 0.0106,
    # 0.0090, 0.0113, 0.0121, 0.0104 and 0.0130, 0.0170, 0.0142; with 36864 x 7168 0.079, 0.078, 0.079, 0.069, 0.069,
    # 0.069 and 0.093, 0.135, 0.104. Below, with 24576 x 1536, 0.0184, 0.0176, 0.0172, 0.0107, 0.0116, 0.0103 and
    # 0.0104, 0.0243, 0.0136.
    Line("hopper", "block_long_batch", first((_CUDA, _DEEP), _BLOCK_DECODE), _CUDA_FEW),
    # 128, 1024 and 4096 rows: with 7168 x 18432 DeepGEMM's 0.055, 0.228, 0.752 ms, torch's 0.066, 0.230, 0.849, ours
    # 0.075, 0.373, 1.39; with 24576 x 1536 0.024, 0.070, 0.240, 0.026, 0.081, 0.272, 0.030, 0.124, 0.456; only with
    # 576 x 7168 and 128 rows ours is the fastest, 0.015. FlashInfer's with 7168 x 18432 0.053, 0.242, 0.866, with
    # 24576 x 1536 0.025, 0.091, 0.336; vLLM's 0.064, 0.245, 0.938 and 0.025, 0.081, 0.292.
    Line("*", "block_prefill", _BLOCK_PREFILL, _H200),
    # On an H100 Gluon's took less time than Triton's in each of nine shapes, 4096, 1024, 256 and 128 rows with
    # 7168 x 18432 1.06, 0.271, 0.084, 0.078 ms against 1.32, 0.363, 0.120, 0.088; less than torch's with 24576 x 1536
    # and 7168 x 2304 (4096 rows 0.282 and 0.122, torch's 0.299 and 0.292), more with 7168 x 18432 (0.873, 0.234, 0.073,
    # 0.071), where it since takes turns: 0.886 against 0.941. In graphs with a warm cache (gluon_h100.json) DeepGEMM's,
    # Gluon's and torch's with 7168 x 18432, 4096, 1024 and 128 rows: 0.811, 0.859, 0.907; 0.255, 0.245, 0.258; 0.053,
    # 0.070, 0.060.
    # In a run on an H200 (cuda_gemm_h200.json) cuda.fp8_gemm took less time than Gluon's in all 27 cases of 128 to 8192
    # rows, and than Triton's in all 18 of 128 to 1024 but two, which no regime tells from others: 2112 x 7168, 128 and
    # 256 rows, 0.0228 ms both, Triton's 0.0137 and 0.0181, Gluon's 0.028; with K in parts they since take 0.0090 and
    # 0.0119 (cuda_gemm_few_rows_h200.json), DeepGEMM's 0.0102 and 0.0120. DeepGEMM's and its with 7168 x 18432, 4096,
    # 2048, 1024, 512 and 128 rows: 0.852, 0.907; 0.559, 0.466; 0.264, 0.246; 0.149, 0.120; 0.051, 0.044 in parts; with
    # 24576 x 1536, 4096, 1024, 768 and 256: 0.289, 0.287; 0.072, 0.074; 0.066, 0.055; 0.020, 0.023; with 7168 x 2304,
    # 4096 and 512: 0.123, 0.126; 0.020, 0.017.
    # With scales of rows side by side, which it turns first ("by_row" there), it took 0.44 to 0.99 of Gluon's time in
    # 24 cases of 128 to 8192 rows and lost four: 24576 x 1536, 128, 256 and 512 rows 0.0162, 0.0225 and 0.0372, Gluon's
    # 0.0156, 0.0215 and 0.0362; 7168 x 2304, 1024 rows 0.0389 and 0.0382.
    Line("hopper", "block_prefill", first((_DEEP, _CUDA, _GLUON), _BLOCK_PREFILL), _CUDA_ONE),
    # With scales that are powers of two DeepGEMM multiplies by them in the tensor cores; it takes no others.
    *(
        Line(
            "blackwell",
            regime,
            first(
                (
                    "deep_gemm.fp8_blocks_ue8m0",
                    "flashinfer.groupwise_trtllm",
                    _VLLM_BLOCKS,
                    "flashinfer.groupwise_cutlass",
                ),
                others,
            ),
            f"vLLM and SGLang try DeepGEMM first ({_VLLM_SAYS}); with 2048 x 1024 and 128 rows a B200 took 5.1 us by "
            "TensorRT-LLM, 6.2 by vLLM's CUTLASS and 7.5 by FlashInfer's "
            "(https://github.com/vllm-project/vllm/pull/31185)",
            expected=True,
        )
        for regime, others in _BLOCK
    ),
    *(
        Line(
            "blackwell_rtx",
            regime,
            first((_VLLM_BLOCKS,), others),
            f"SGLang runs CUTLASS on sm_120, and vLLM tries it before Triton ({_VLLM_SAYS})",
            expected=True,
        )
        for regime, others in _BLOCK
    ),
    # Kernels with a feature for activations that are not quantised; neither was measured so.
    *(
        Line(
            family,
            "weight_only",
            first(("marlin.fp8_bfloat16", "marlin.fp8_float16"), _WEIGHT_ONLY),
            f"Marlin was made for sm_80, and is what vLLM runs of its own there ({_VLLM_SAYS})",
            expected=True,
        )
        for family in ("ampere", "ada")
    ),
    Line(
        "*",
        "weight_only",
        _WEIGHT_ONLY,
        "Triton decodes in registers, torch through float32 in memory; Marlin supports packed weights only",
    ),
    Line("*", "row_block", (_TRITON, _LAST), "Triton multiplies float8, torch decodes to float32 in memory first"),
    # 16, 64, 256 and 1024 rows with 7168 x 2304, Triton's and weights in bfloat16: 0.022, 0.029, 0.036, 0.082 ms and
    # 0.008, 0.009, 0.014, 0.050 (mxfp8_rows_h200.json).
    Line("*", "mx", (_TRITON, "flashinfer.mx_cutlass", "flashinfer.mx_cudnn", _LAST), _H200),
    # cuDNN makes a plan for each number of rows.
    Line(
        "blackwell",
        "mx",
        ("flashinfer.mx_cutlass", "flashinfer.mx_cudnn", _TRITON, _LAST),
        f"vLLM tries FlashInfer's CUTLASS before all that decode MXFP8 ({_VLLM_SAYS})",
        expected=True,
    ),
)

_BMM_NOT_RUN = tuple(f"flashinfer.bmm_{name}" for name in ("cutlass", "cudnn"))
_ALL = ("triton.bmm_fp8", "flashinfer.bmm_cublas", *_BMM_NOT_RUN, "torch.dequantized")

BMM_FP8 = (
    # 128 x 512 x 128, 16 rows each, on one core: 1.7 ms, 10.4 dequantized.
    Line(
        "cpu",
        "*",
        ("cpp.bmm_fp8", "torch.dequantized", "triton.bmm_fp8"),
        "measured on an EPYC of Zen 5, torch 2.13, 2026-11-20",
    ),
    # 128 x 512 x 128, 16 rows each: 0.010 and 0.081 ms; FlashInfer's cuBLASLt 0.015; 1024 rows 0.086 and 0.094.
    Line("*", "*", _ALL, _H200),
    Line(
        "blackwell",
        "*",
        first(("flashinfer.bmm_cutlass", "flashinfer.bmm_cublas"), _ALL),
        "vLLM runs FlashInfer's for products scaled by tensor there "
        "(https://github.com/vllm-project/vllm/tree/v0.33.0/vllm/model_executor/kernels/linear)",
        expected=True,
    ),
)

ORDER = {
    "fp8_gemm": FP8_GEMM,
    "bmm_fp8": BMM_FP8,
}
