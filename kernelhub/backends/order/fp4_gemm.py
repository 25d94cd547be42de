"""Order of the kernels of `fp4_gemm`."""

from kernelhub.dispatch.order import Line

_MARLIN = ("marlin.nvfp4_bfloat16", "marlin.nvfp4_float16", "marlin.mxfp4")
LINES = (
    Line("cpu", "*", ("torch.dequantized", "triton.fp4_gemm"), "Triton is only interpreted on a CPU"),
    Line(
        "*",
        "*",
        ("triton.fp4_gemm", *_MARLIN, "cutlass.vllm_fp4", "flashinfer.fp4_cutlass", "torch.dequantized"),
        "CUTLASS's, of vLLM's library and of FlashInfer, have not run here, since no Blackwell was at hand; nor have "
        "Marlin's, which read weights that were packed for them and no others do",
    ),
)
