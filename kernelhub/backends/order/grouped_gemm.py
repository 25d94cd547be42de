"""Order of the kernels of `grouped_gemm`."""

from kernelhub.dispatch.order import Line

_H200 = "measured on an H200, the only GPU so far (benchmarks/results/grouped_gemm_h200.json)"
_SCALED = "torch.scaled_grouped_mm"

# Masked: tiles beyond a group's rows are skipped by both, and by its own figures DeepGEMM's product is the faster. Rows
# sorted by group it wants padded to 128 a group, for which they are copied: few rows do not pay for that.
_DEEP_GEMM = "DeepGEMM's own figures; all others: "
_MASKED = ("deep_gemm.fp8_masked", "deep_gemm.bf16_masked")
_PADDED = "deep_gemm.fp8_contiguous"
# Not run yet: DeepGEMM's for sm_10x, of which none was at hand, and FlashInfer's.
_NOT_RUN = (
    "deep_gemm.fp8_masked_ue8m0",
    "deep_gemm.fp8_contiguous_ue8m0",
    "flashinfer.segments",
    "flashinfer.groupwise",
)

LINES = (
    Line("cpu", "*", ("torch.per_group", "triton.grouped"), "Triton is only interpreted on a CPU"),
    # 8 and 2 rows a group: 0.204 and 0.420 ms against torch's 0.266 and 0.503; 256 and 128: 0.606 and 0.842 against
    # 0.452 and 0.794.
    Line(
        "*",
        "decode",
        (*_MASKED, "triton.grouped", "torch.grouped_mm", _PADDED, _SCALED, *_NOT_RUN, "torch.per_group"),
        _DEEP_GEMM + _H200,
    ),
    # float8 scaled by row, which torch's scaled_grouped_mm and ours take: 128 groups of 256 rows with 1536 x 2048 took
    # 0.64 ms against 0.42; 256 of 128 with 512 x 7168 0.36 against 0.45; 32 of 256 with 4096 x 7168 0.47 against 0.85.
    Line(
        "*",
        "prefill",
        (*_MASKED, _PADDED, "torch.grouped_mm", "triton.grouped", _SCALED, *_NOT_RUN, "torch.per_group"),
        _DEEP_GEMM + _H200,
    ),
    Line(
        "*",
        "prefill_long",
        (*_MASKED, _PADDED, "torch.grouped_mm", _SCALED, "triton.grouped", *_NOT_RUN, "torch.per_group"),
        _DEEP_GEMM + _H200,
    ),
)
