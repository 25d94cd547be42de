"""Where xformers' operators ran, and which devices they say that they are for."""

from __future__ import annotations

from kernelhub.dispatch.standing import published, verified

STANDINGS = (
    verified(
        "hopper",
        evidence="NVIDIA H200, 2026-11-21, torch 2.11.0+cu130, xformers 0.0.35: 85 tests passed "
        "(benchmarks/results/libraries_h200.json)",
    ),
    published(
        "ampere",
        "ada",
        evidence="xformers says of FlashAttention that it is for sm_80 on, and of CUTLASS for GPUs as old as a P100: "
        "https://github.com/facebookresearch/xformers/blob/89177a9e60b4e522d3a08b0d7fb87daa56d0bae5/"
        "xformers/ops/fmha/flash.py and .../cutlass.py",
    ),
)
