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
        evidence="the operators state the least compute capability, sm_80 and sm_50: "
        "https://github.com/facebookresearch/xformers/tree/v0.0.32.post2/xformers/ops/fmha",
    ),
)
