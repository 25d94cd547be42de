"""Order of the kernels of grouped products."""

from kernelhub.dispatch.order import Line, first

_H200 = (
    "measured on an H200 (benchmarks/results/grouped_gemm_h200.json); Gluon's on an H100 "
    "(benchmarks/results/gluon_h100.json)"
)
# Gluon's were then given stores of whole vectors. On an H200 (gluon_h200.json), before and after, and Triton's: 32
# groups of 128, 512 and 1024 rows with 4096 x 7168 0.316, 0.984 and 2.06 ms, then 0.301, 0.896 and 1.83, and 0.491,
# 1.90 and 3.58; 128 of 16, 64 and 256 with 1536 x 2048 0.129, 0.162 and 0.363, then 0.142, 0.137 and 0.272, and 0.106,
# 0.137 and 0.457.
_SCALED = "torch.scaled_grouped_mm"

# DeepGEMM needs sorted groups padded to 128 rows, which costs a copy: no measured size pays for that, see
# below, and the one in bfloat16 has not run. With rows in places of their own nothing has to be moved.
_MASKED = ("deep_gemm.fp8_masked", "deep_gemm.bf16_masked")
_PADDED = ("deep_gemm.fp8_contiguous", "deep_gemm.bf16_contiguous")
# FlashInfer's takes 1.1 to 2.5 times as long as ours: 128 groups of 8 and 256 rows with 1536 x 2048 0.459 and 0.593 ms.
_SEGMENTS = "flashinfer.segments"
_GLUON, _GLUON_HALVES = "gluon.grouped_fp8", "gluon.grouped_halves"
# For Blackwell.
_NOT_RUN = (
    "deep_gemm.fp8_masked_ue8m0",
    "deep_gemm.fp8_contiguous_ue8m0",
    "flashinfer.groupwise",
    # Rows and weights in tensor cores as they are, and scales of all weights brought into tiles at each call.
    "cutlass.vllm_groups_nvfp4",
    "cutlass.vllm_groups_mxfp4",
    "flashinfer.groups_nvfp4",
    "flashinfer.groups_mxfp8_mxfp4",
    "flashinfer.masked_cute_dsl",
)
_LAST = (*_PADDED, _SEGMENTS, *_NOT_RUN, "torch.per_group")
_DECODE = ("triton.grouped", _GLUON, *_MASKED, _GLUON_HALVES, "torch.grouped_mm", _SCALED, *_LAST)
_PREFILL = (*_MASKED, _GLUON_HALVES, "torch.grouped_mm", _GLUON, "triton.grouped", _SCALED, *_LAST)
_LONG = (*_MASKED, _GLUON_HALVES, "torch.grouped_mm", _SCALED, _GLUON, "triton.grouped", *_LAST)
# What multiplies scaled operands in Blackwell's tensor cores, each its own formats.
_FP4 = (
    "flashinfer.masked_cute_dsl",
    "cutlass.vllm_groups_nvfp4",
    "cutlass.vllm_groups_mxfp4",
    "flashinfer.groups_nvfp4",
    "flashinfer.groups_mxfp8_mxfp4",
)
_VLLM = "https://github.com/vllm-project/vllm/tree/v0.33.0/vllm/model_executor/layers/fused_moe/oracle"

GROUPED_GEMM = (
    Line("cpu", "*", ("torch.per_group", "triton.grouped"), "Triton is only interpreted on a CPU"),
    # float8 in blocks, ours and DeepGEMM's (tokenspeed-deepgemm 2.5.0): 32 groups of 8, 32 and 64 rows with 4096 x 7168
    # took 0.234, 0.272 and 0.272 ms against 0.283, 0.344 and 0.329 in places of their own, and 1.04 to 1.24 padded;
    # 128 groups of 16 0.926 against 1.08.
    # bfloat16 and torch's: 8 and 2 rows a group: 0.204 and 0.420 ms against 0.266 and 0.503; 256 and 128: 0.606 and
    # 0.842 against 0.452 and 0.794.
    # On an H100 Gluon's and Triton's, float8 in blocks: 32 groups of 32 and 128 of 16 rows with 4096 x 7168 0.350 and
    # 1.34 ms against 0.350 and 1.38; 128 of 64 with 1536 x 2048 0.172 and 0.169.
    Line(
        "*",
        "decode",
        _DECODE,
        _H200,
    ),
    # float8 in blocks: 32 groups of 128 and 512 rows with 4096 x 7168 take 0.295 and 0.831 ms masked, with 7168 x 2048
    # 0.175 and 0.444; ours 0.460, 1.72, 0.257 and 0.945. Sorted rows: 1.62 and 1.80, 1.20 and 1.55 padded, ours 0.464
    # and 1.67, 0.250 and 0.896; only 128 groups of 256 are faster padded, 3.22 against 3.71.
    # float8 scaled by row, which torch's scaled_grouped_mm and ours take: 128 groups of 256 rows with 1536 x 2048 took
    # 0.64 ms against 0.42; 256 of 128 with 512 x 7168 0.36 against 0.45; 32 of 256 with 4096 x 7168 0.47 against 0.85.
    # On an H100 Gluon's and Triton's, float8 in blocks: 32 groups of 128, 512 and 1024 rows with 4096 x 7168 0.386,
    # 1.05 and 2.04 ms against 0.474, 1.76 and 3.33; 128 of 256 with 1536 x 2048 0.371 and 0.431. In places of their
    # own 128 and 512 rows 0.390 and 0.985, DeepGEMM's 0.353 and 0.822.
    # In bfloat16 on an H200 (gluon_tiles_h200.json), gluon.grouped_halves in the tile that it takes, torch and Triton:
    # 4096 tokens of Qwen3's experts 0.416, 0.498 and 0.610 ms, their second matrices 0.245, 0.287 and 0.358; 128 groups
    # of 256 and 1024 rows with 1536 x 2048 0.400, 0.365 and 0.439, 1.32, 1.35 and 1.58; 32 of 512 and 8 of 4096 with
    # 4096 x 7168 1.46, 1.49 and 1.58, 2.89, 2.95 and 3.33. With 16, 128 and 1024 tokens of Qwen3's, as few rows as in
    # decode, ours and Triton's: 0.133, 0.200 and 0.228, 0.126, 0.195 and 0.247.
    Line(
        "*",
        "prefill",
        _PREFILL,
        _H200,
    ),
    Line(
        "*",
        "prefill_long",
        _LONG,
        _H200,
    ),
    # Padded groups are copied, which few rows do not pay for.
    *(
        Line(
            "blackwell",
            regime,
            first(("deep_gemm.fp8_masked_ue8m0", *_FP4, *padded), others),
            "vLLM tries CuTe DSL before CUTLASS with NVFP4, and DeepGEMM before Triton with float8 in blocks "
            f"({_VLLM}), all of which multiply scaled operands as they are",
            expected=True,
        )
        for regime, padded, others in (
            ("decode", (), _DECODE),
            ("prefill", ("deep_gemm.fp8_contiguous_ue8m0", "flashinfer.groupwise"), _PREFILL),
            ("prefill_long", ("deep_gemm.fp8_contiguous_ue8m0", "flashinfer.groupwise"), _LONG),
        )
    ),
    *(
        Line(
            "blackwell_rtx",
            regime,
            first(("cutlass.vllm_groups_nvfp4", "flashinfer.groups_nvfp4", "flashinfer.groups_mxfp8_mxfp4"), others),
            "vLLM added its grouped NVFP4 for sm_120, run on an RTX 5090 "
            "(https://github.com/vllm-project/vllm/pull/29242); Triton decodes what these multiply as it is",
            expected=True,
        )
        for regime, others in (("decode", _DECODE), ("prefill", _PREFILL), ("prefill_long", _LONG))
    ),
)

ORDER = {
    "grouped_gemm": GROUPED_GEMM,
}
