"""Where Marlin's kernels ran, and which devices vLLM says that they are for."""

from __future__ import annotations

from kernelhub.dispatch.standing import published, verified

_TABLE = "https://github.com/vllm-project/vllm/blob/main/docs/features/quantization/README.md#supported-hardware"

FP4 = (
    verified(
        "hopper",
        evidence="NVIDIA H200, 2026-11-21, torch 2.11.0+cu130, vllm 0.33.0, its library by itself: 42 tests passed "
        "(benchmarks/results/libraries_h200.json)",
    ),
    published(
        "ampere",
        "ada",
        evidence="vLLM runs float4 weights by Marlin where the GPU has no float4 products: "
        "https://github.com/vllm-project/vllm/pull/49376",
    ),
)
FP8 = (published("ampere", "ada", "hopper", evidence=f"vLLM supports Marlin's float8 weights there: {_TABLE}"),)
