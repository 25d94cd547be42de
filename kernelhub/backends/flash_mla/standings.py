"""Where FlashMLA's kernels ran, and which devices its authors say that they are for."""

from __future__ import annotations

from kernelhub.dispatch.standing import published, verified

_H200 = verified(
    "hopper",
    evidence="NVIDIA H200, 2026-11-22, torch 2.11.0+cu130, tokenspeed-flashmla 1.0.0.post20260615: 270 tests passed; "
    "2026-11-21, sgl-flash-mla 1.0.0: 267 tests passed (benchmarks/results/libraries_h200.json)",
)

DENSE = (_H200,)
LISTED = (
    _H200,
    published(
        "blackwell",
        evidence="FlashMLA's prefill of listed tokens is for sm_90 and sm_100; its authors measured up to 1450 TFLOP/s "
        "on a B200 and 640 on an H800: https://github.com/deepseek-ai/FlashMLA#performance",
        figure="1450 TFLOP/s on a B200, 640 on an H800",
    ),
)
