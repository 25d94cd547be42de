"""Order of the kernels of `fp8_gemm`."""

from kernelhub.dispatch.order import Line

_TRITON = "triton.fp8_gemm"
_LAST = "torch.dequantized"
_H200 = "measured on an H200, the only GPU so far (benchmarks/results/gemm_h200.json)"

LINES = (
    # 4096 x 4096 weights in blocks, 1, 16 and 256 rows, on two cores: 0.58, 1.51, 12.6 ms; dequantized 5.2, 9.3, 50.
    Line("cpu", "*", ("cpp.fp8_gemm", _LAST, _TRITON), "measured on an EPYC of Zen 5, torch 2.13, 2026-11-20"),
    # 4096 rows with 8192 x 8192: 0.416 ms by tensor, 0.430 by row; a single row 0.031 and 0.045, ours 0.032.
    Line("*", "tensor", ("torch.scaled_mm", _TRITON, _LAST), _H200),
    Line("*", "row", ("torch.scaled_mm_rowwise", _TRITON, _LAST), _H200),
    Line("*", "block", (_TRITON, _LAST), _H200),
    Line("*", "mx", (_TRITON, _LAST), _H200),
)
