"""Where DeepGEMM's kernels ran, and which devices its authors say that they are for."""

from __future__ import annotations

from kernelhub.dispatch.standing import published, verified

_ON = "NVIDIA H200, 2026-11-22, torch 2.11.0+cu130"
_TOKENSPEED = "tokenspeed-deepgemm 2.5.0.post20260629: 104 tests passed"
_SGLANG = "2026-11-21, sgl-deep-gemm 0.1.4.post1: 92 tests passed"
_RESULTS = "(benchmarks/results/libraries_h200.json)"
_H200 = verified("hopper", evidence=f"{_ON}, {_TOKENSPEED}; {_SGLANG} {_RESULTS}")
_SM100 = published(
    "blackwell",
    evidence="DeepGEMM is for sm_90 and sm_100, there with scales in UE8M0: "
    "https://github.com/deepseek-ai/DeepGEMM#requirements",
)

ON_HOPPER = (_H200,)
ON_BLACKWELL = (_SM100,)
ON_BOTH = (_H200, _SM100)
BF16_PADDED = (verified("hopper", evidence=f"{_ON}, {_TOKENSPEED} {_RESULTS}"), _SM100)
