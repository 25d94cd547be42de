"""Order of the kernels of `fp8_gemm`."""

from kernelhub.dispatch.order import Line

_TRITON = "triton.fp8_gemm"
_LAST = "torch.dequantized"
# Its README gives up to 1550 TFLOP/s on an H800. It and ours are not yet measured side by side.
_DEEP = ("deep_gemm.fp8_blocks", "deep_gemm.fp8_blocks_ue8m0")
_DEEP_GEMM = "DeepGEMM's own figures; ours alone: "
_H200 = "measured on an H200, the only GPU so far (benchmarks/results/gemm_h200.json)"

LINES = (
    # 4096 x 4096 weights in blocks, 1, 16 and 256 rows, on two cores: 0.58, 1.51, 12.6 ms; dequantized 5.2, 9.3, 50.
    Line("cpu", "*", ("cpp.fp8_gemm", _LAST, _TRITON), "measured on an EPYC of Zen 5, torch 2.13, 2026-11-20"),
    # 1, 64, 256 and 4096 rows with 8192 x 8192: 0.030, 0.035, 0.037, 0.427 ms; ours 0.031, 0.035, 0.050, 0.580.
    Line("*", "tensor", ("torch.scaled_mm", _TRITON, _LAST), _H200),
    # Six shapes, 1 to 64 rows: ours took 0.53 to 0.93 of torch's time, with 8192 x 8192 0.031 and 0.034 ms against
    # 0.048 and 0.040. From 96 rows on torch's is faster but for the smallest: 0.035 against 0.038, 4096 rows 0.448
    # against 0.586.
    Line("*", "row_decode", (_TRITON, "torch.scaled_mm_rowwise", _LAST), _H200),
    Line("*", "row_prefill", ("torch.scaled_mm_rowwise", _TRITON, _LAST), _H200),
    # 4 to 64 rows: ours takes 0.64 to 1.11 of torch's time in six shapes.
    Line("*", "block_decode", (*_DEEP, _TRITON, "torch.scaled_mm_blockwise", _LAST), _DEEP_GEMM + _H200),
    # 128, 1000 and 4096 rows with 7168 x 18432: torch's 0.060, 0.225, 0.83 ms, ours 0.078, 0.373, 1.3 to 1.45; only
    # with 576 and 2112 columns and 128 rows ours is faster, 0.015 and 0.019 against 0.019 and 0.025.
    Line("*", "block_prefill", (*_DEEP, "torch.scaled_mm_blockwise", _TRITON, _LAST), _DEEP_GEMM + _H200),
    Line("*", "mx", (_TRITON, _LAST), _H200),
)
