"""Order of the kernels of `bmm_fp8`."""

from kernelhub.dispatch.order import Line, first

_H200 = "measured on an H200, the only GPU so far (benchmarks/results/gemm_h200.json)"

_NOT_RUN = tuple(f"flashinfer.bmm_{name}" for name in ("cutlass", "cudnn"))
_ALL = ("triton.bmm_fp8", "flashinfer.bmm_cublas", *_NOT_RUN, "torch.dequantized")

LINES = (
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
